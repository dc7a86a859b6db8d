"""Where the supervisors of several hosts meet: keys of a store that one of them serves.

The store is in a supervisor and not in a rank, so it outlives generations, and any host's ranks may come and go. When
its supervisor is lost, the remaining ones meet at the next place that the user named.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable
from typing import Any

from convmesh.supervise.meeting_store import StoreClient, StoreLostError
from convmesh.supervise.places import Places, Waiting
from convmesh.supervise.policy import Policy
from convmesh.supervise.run_token import RunToken
from convmesh.supervise.world import LOOPBACK, free_port

SECONDS_FAREWELL = 10.0
"""How long the store's host keeps serving it after the end."""


class Rendezvous:
    """One supervisor's view of the store."""

    def __init__(self, endpoints: str, policy: Policy, token: RunToken) -> None:
        self._policy = policy
        self._places = Places(endpoints, token, policy.seconds_host)
        self._join(Waiting(policy.seconds_start, policy.seconds_start * len(self._places)), lambda: True)

    def move(self, may_serve: Callable[[], bool]) -> None:
        """Meet again after the store was lost: where it was if it answers again, else at a later place."""
        self._store.close()
        seconds = self._policy.seconds_host
        most = max(self._policy.seconds_timeout, 2 * seconds * len(self._places)) if len(self._places) > 1 else seconds
        self._join(Waiting(seconds, most, self._places.current), may_serve)

    def give_way(self) -> str:
        """If this supervisor serves, and others meet elsewhere: give the store up; where they do, or nothing."""
        place = self._places.elsewhere(_is_at_work)
        if place:
            self._places.give_way()
        return place

    def _join(self, patience: Waiting, may_serve: Callable[[], bool]) -> None:
        self._store, self.serves = self._places.find(patience, may_serve)
        self.address = self._store.own_address
        self._beats = 0
        self.member = self.add("members") - 1
        self.set(f"member/{self.member}", {"host": platform.node(), "slots": self._policy.ranks})

    def beat(self, slots: int, port: int) -> None:
        """Say that this host is alive, how many ranks it can have, and where its first one would listen."""
        self._beats += 1
        here = {"beats": self._beats, "slots": slots, "address": self.address, "port": port}
        self.set(f"beat/{self.member}", here)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        """The value, or None."""
        return self._store.get(key)

    def add(self, key: str, amount: int = 1) -> int:
        return self._store.add(key, amount)

    def close(self) -> None:
        """Hang up; a store that this supervisor serves lives as long as its process."""
        self._store.close()

    def leave(self, hosts: int) -> None:
        """Leave at the end: the store's host serves it until all `hosts` live hosts have heard of the end."""
        with contextlib.suppress(StoreLostError):
            left = self.add("left")
            end = time.monotonic() + SECONDS_FAREWELL
            while self.serves and left < hosts and time.monotonic() < end:
                time.sleep(0.05)
                left = self.add("left", 0)


def _is_at_work(store: StoreClient) -> bool:
    """Whether ranks run that its coordinator has started."""
    number = store.get("current")
    return number is not None and store.get(f"over/{number}") is None


def port_here(address: str) -> int:
    """A free port for the next generation's first rank, if that is on this host."""
    try:
        return free_port(LOOPBACK if address.startswith("127.") else address)
    except OSError:  # the host has lost its address: the others will notice its silence
        return free_port()
