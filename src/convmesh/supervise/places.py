"""Where supervisors may meet, in order: at the first place that serves, or at a later one when that is lost."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from convmesh.errors import RunError
from convmesh.supervise.meeting_store import OtherTokenError, StoreClient, StoreLostError, StoreServer
from convmesh.supervise.run_token import VARIABLE, RunToken

_SECONDS_PROBE, _SECONDS_PAUSE = 2.0, 0.25


class Silence(Enum):
    """Why nobody serves at a place."""

    REFUSES = auto()
    """The host answers, but no supervisor serves there."""
    SILENT = auto()
    """The host, or the link to it, may be gone: what runs there may still be running."""


@dataclass(frozen=True)
class Waiting:
    """How long to wait for a place before another one serves instead."""

    seconds: float
    seconds_most: float
    """After this, give up."""
    lost: int = -1
    """The place that was lost. If its host says that nobody serves there, do not wait for it."""

    def of(self, place: int, silence: Silence) -> float:
        return 0.0 if place == self.lost and silence is Silence.REFUSES else self.seconds


class Places:
    """The endpoints that the user named; some may be on this host."""

    def __init__(self, endpoints: str, token: RunToken, seconds_call: float) -> None:
        self.endpoints, self._token, self._seconds_call = endpoints, token, seconds_call
        self._places = [_parsed(each) for each in endpoints.split(",")]
        self._sockets = {index: listener for index, place in enumerate(self._places) if (listener := _bound(place))}
        self._own = min(self._sockets, default=len(self._places))
        """The first that is on this host."""
        self._server: StoreServer | None = None
        self.current = -1

    def __len__(self) -> int:
        return len(self._places)

    def find(self, patience: Waiting, may_serve: Callable[[], bool]) -> tuple[StoreClient, bool]:
        """The store, and whether this supervisor serves it, which it does if earlier places are silent for long."""
        began = since = time.monotonic()
        while True:
            silences: dict[int, Silence] = {}
            for place in range(len(self._places)):
                answer = self._probe(place, self._seconds_call)
                if isinstance(answer, StoreClient):
                    self.current = place
                    return answer, False
                silences[place] = answer
            now, is_free = time.monotonic(), may_serve()
            if not is_free:
                since = now
            elif self._is_next(silences, patience, now - since) and (client := self._serve()) is not None:
                return client, True
            if now - began > patience.seconds_most:
                why = "" if is_free else ", and a host that cannot be reached has the run folder in use"
                raise RunError(f"`--rendezvous` (={self.endpoints!r}): nobody answers there{why}.")
            time.sleep(_SECONDS_PAUSE)

    def elsewhere(self, is_at_work: Callable[[StoreClient], bool]) -> str:
        """For a supervisor that serves and has no work: the place of others that it should join, or nothing.

        Of two that both wait, the earlier place stays, so that they do not change places.
        """
        for place, (host, port) in enumerate(self._places):
            if place != self.current and self._is_better(place, is_at_work):
                return f"{host}:{port}"
        return ""

    def _is_better(self, place: int, is_at_work: Callable[[StoreClient], bool]) -> bool:
        with contextlib.suppress(RunError, StoreLostError):  # one of another run is none of ours
            answer = self._probe(place, _SECONDS_PROBE)
            if isinstance(answer, StoreClient):
                with contextlib.closing(answer):
                    return place < self.current or is_at_work(answer)
        return False

    def give_way(self) -> None:
        """Serve no longer. Those who have met here lose the store, this supervisor too, and find the other place."""
        if self._server is not None:
            self._sockets[self.current] = self._server.close()
            self._server = None

    def close(self) -> None:
        """Release this host's places to others, except one that serves."""
        while self._sockets:
            self._sockets.popitem()[1].close()

    def _is_next(self, silences: dict[int, Silence], patience: Waiting, waited: float) -> bool:
        """Each earlier place gets its time, one after another, so that no two supervisors begin to serve at once."""
        before = (patience.of(place, silence) for place, silence in silences.items() if place < self._own)
        return self._own in self._sockets and waited >= sum(before)

    def _probe(self, place: int, seconds_call: float) -> StoreClient | Silence:
        try:  # it must answer, too: a process that is stopped has connections
            client = StoreClient(self._places[place], self._token, _SECONDS_PROBE, _SECONDS_PROBE)
        except OtherTokenError as error:
            raise RunError(
                f"`--rendezvous` (={self.endpoints!r}): {error}, so it is of another run; "
                f"give both the same run folder, or the same `{VARIABLE}`, or meet elsewhere."
            ) from None
        except (ConnectionRefusedError, ConnectionResetError):
            return Silence.REFUSES
        except OSError:
            return Silence.SILENT
        client.wait_at_most(seconds_call)
        return client

    def _serve(self) -> StoreClient | None:
        with contextlib.suppress(OSError):  # another supervisor on this host was first
            self._sockets[self._own].listen()
            self._server = StoreServer(self._sockets.pop(self._own), self._token)
            self.current = self._own
            return StoreClient(self._places[self._own], self._token, _SECONDS_PROBE, self._seconds_call)
        return None


def _parsed(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.strip().rpartition(":")
    return host, int(port)


def _bound(place: tuple[str, int]) -> socket.socket | None:
    """A socket that has this address but does not listen yet; None if the address is another host's."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(place)
    except OSError:
        listener.close()
        return None
    return listener
