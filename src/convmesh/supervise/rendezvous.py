"""Where the supervisors of several hosts meet: keys of a store that one of them serves.

The store is in a supervisor and not in a rank, so it outlives generations, and any host's ranks may come and go.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from convmesh.errors import RunError
from convmesh.supervise.world import LOOPBACK, free_port

SECONDS_CALL = 60.0
"""How long to wait for the store itself."""

SECONDS_FAREWELL = 10.0
"""How long the host of the store serves it after the end."""


class Rendezvous:
    """One supervisor's view of the store. The one that can bind the address serves it."""

    def __init__(self, endpoint: str, slots: int) -> None:
        self.endpoint = endpoint
        host, _, port = endpoint.rpartition(":")
        self._store, self.serves = _opened(host, int(port))
        self.address = _own_address(host, int(port))
        self.member = self.add("members") - 1
        self._beats = 0
        self.set(f"member/{self.member}", {"host": socket.gethostname(), "slots": slots})

    def beat(self, slots: int, port: int) -> None:
        """Say that this host is alive, how many ranks it can have, and where its first one would listen."""
        self._beats += 1
        here = {"beats": self._beats, "slots": slots, "address": self.address, "port": port}
        self.set(f"beat/{self.member}", here)

    def set(self, key: str, value: Any) -> None:
        with self._telling_losses():
            self._store.set(f"convmesh/{key}", json.dumps(value))

    def get(self, key: str) -> Any:
        """What is there, or None."""
        with self._telling_losses():
            if not self._store.check([f"convmesh/{key}"]):
                return None
            return json.loads(self._store.get(f"convmesh/{key}"))

    def add(self, key: str, amount: int = 1) -> int:
        with self._telling_losses():
            return int(self._store.add(f"convmesh/{key}", amount))

    def leave(self, hosts: int) -> None:
        """The end: the host of the store serves it until all `hosts` that live have heard of it."""
        with contextlib.suppress(RunError):
            left = self.add("left")
            end = time.monotonic() + SECONDS_FAREWELL
            while self.serves and left < hosts and time.monotonic() < end:
                time.sleep(0.05)
                left = self.add("left", 0)

    @contextlib.contextmanager
    def _telling_losses(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch's errors of stores and networks are of this kind
            raise RunError(
                f"`--rendezvous` (={self.endpoint!r}): the host that serves it does not answer; "
                "start the run again with --resume, on a host that lives."
            ) from error


def _opened(host: str, port: int) -> tuple[Any, bool]:
    import torch.distributed as dist

    timeout = timedelta(seconds=SECONDS_CALL)
    options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False}
    try:
        listener = socket.create_server((host, port))
    except OSError:  # another host's address, or another supervisor of this one was first
        try:
            return dist.TCPStore(host, port, **options), False  # type: ignore[attr-defined]
        except RuntimeError:
            raise RunError(f"`--rendezvous` (='{host}:{port}'): nobody answers there.") from None
    options |= {"is_master": True, "master_listen_fd": listener.detach()}
    return dist.TCPStore(host, port, **options), True  # type: ignore[attr-defined]


def _own_address(host: str, port: int) -> str:
    """This host's address on the way to the rendezvous."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((host, port))
        return str(probe.getsockname()[0])
    return socket.gethostname()


def port_here(address: str) -> int:
    """A free port for the next generation's first rank, if that is on this host."""
    return free_port(LOOPBACK if address.startswith("127.") else address)
