"""A few keys that one supervisor serves to those of other hosts: lines of JSON over TCP, one answer per question.

torch's store waits for a silent host until the system gives up on the connection; this one has a time limit for
every question, and needs no torch. Nothing from the network is unpickled or run. A client that cannot prove that it
knows the run's token gets no answer, and a client does not go on with a server that cannot.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import IO, Any

from convmesh.supervise.run_token import RunToken, drawn_number

_MOST_BYTES, _MOST_BYTES_STRANGER = 1 << 20, 1 << 10
"""Per line."""

_SECONDS_PROOF, _MOST_STRANGERS = 10.0, 64
"""How long a connection may take to prove itself, and how many may be doing so at a time."""

_SECONDS_PAUSE = 0.1


class StoreLostError(ConnectionError):
    """The supervisor that serves the store does not answer."""


class OtherTokenError(ConnectionError):
    """The supervisor that answers has another token: it belongs to another run."""


class _Strangers:
    """Connections that have yet to prove themselves: the latest few.

    When there is one too many, the one that has been silent longest is disconnected. A member proves itself at once, so
    silent strangers, however many, do not keep it out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []

    def arrive(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.append(connection)
            if len(self._connections) > _MOST_STRANGERS:
                with contextlib.suppress(OSError):  # it has already hung up
                    self._connections.pop(0).shutdown(socket.SHUT_RDWR)

    def leave(self, connection: socket.socket) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._connections.remove(connection)


class StoreServer:
    """Serves from its constructor until `close` or the end of the process, each client in a thread of its own."""

    def __init__(self, listener: socket.socket, token: RunToken) -> None:
        self._listener, self._token, self._lock = listener, token, threading.Lock()
        self._strangers = _Strangers()
        self._values: dict[str, Any] = {}
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self) -> socket.socket:
        """Hang up on all. The listener keeps its address, but listens no longer; another server may have it."""
        self._is_closed = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # it has hung up itself
                    connection.shutdown(socket.SHUT_RDWR)
        return self._listener

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the client has left already, or no file is free: go on serving those that are here
                time.sleep(_SECONDS_PAUSE)
                continue
            with self._lock:
                self._connections.add(connection)
            self._strangers.arrive(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Serve until the client leaves, or sends something that is not a question."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError), connection:
            lines = connection.makefile("rb")
            is_member = self._is_of_this_run(connection, lines)
            while is_member and (line := lines.readline(_MOST_BYTES)):
                _send(connection, self._answer(json.loads(line)))
        with self._lock:
            self._connections.discard(connection)

    def _is_of_this_run(self, connection: socket.socket, lines: IO[bytes]) -> bool:
        """Have the client prove itself, in time; then prove ourselves."""
        try:
            connection.settimeout(_SECONDS_PROOF)
            _send(connection, {"number": (number := drawn_number())})
            said = json.loads(lines.readline(_MOST_BYTES_STRANGER))
            numbers = number, str(said["number"])
            is_proven = self._token.is_proven(said["proof"], "client", numbers)
            _send(connection, {"proof": self._token.proof("server", numbers) if is_proven else None})
            connection.settimeout(None)
            return is_proven
        finally:
            self._strangers.leave(connection)

    def _answer(self, question: dict[str, Any]) -> Any:
        key, value = question["key"], question.get("value")
        with self._lock:
            match question["do"]:
                case "set":
                    self._values[key] = value
                case "add":
                    self._values[key] = self._values.get(key, 0) + value
            return self._values.get(key)


class StoreClient:
    """One connection to a server."""

    def __init__(self, address: tuple[str, int], token: RunToken, seconds_connect: float, seconds_call: float) -> None:
        self._place = "{}:{}".format(*address)
        self._socket = socket.create_connection(address, seconds_connect)
        self._socket.settimeout(seconds_call)
        self._lines = self._socket.makefile("rb")
        self.own_address = str(self._socket.getsockname()[0])
        """The address of this host that leads to the server."""
        try:
            self._prove(token)
        except BaseException:
            self.close()
            raise

    def set(self, key: str, value: Any) -> None:
        self._ask(do="set", key=key, value=value)

    def get(self, key: str) -> Any:
        """The value, or None."""
        return self._ask(do="get", key=key)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(do="add", key=key, value=amount))

    def wait_at_most(self, seconds: float) -> None:
        """Limit the wait for each answer from now on."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def _prove(self, token: RunToken) -> None:
        """Prove that this is a supervisor of the run, and check that the server is one."""
        with self._telling_loss():
            numbers = str(self._heard()["number"]), drawn_number()
            _send(self._socket, {"number": numbers[1], "proof": token.proof("client", numbers)})
            proof = self._heard()["proof"]
        if not token.is_proven(proof, "server", numbers):
            raise OtherTokenError(f"the supervisor at {self._place} has another token than this one ({token.origin})")

    def _ask(self, **question: Any) -> Any:
        with self._telling_loss():
            _send(self._socket, question)
            return self._heard()

    def _heard(self) -> Any:
        line = self._lines.readline(_MOST_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the connection was closed")
        return json.loads(line)

    @contextlib.contextmanager
    def _telling_loss(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreLostError(f"lost {self._place} ({error})") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise StoreLostError(f"lost {self._place} (it is no supervisor)") from error


def _send(connection: socket.socket, value: Any) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")
