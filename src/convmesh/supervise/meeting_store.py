"""A few keys that one supervisor serves to those of other hosts: lines of JSON over TCP, one answer for each question.

torch's store waits for a host that is silent until the system gives up on the connection; this one has a time limit for
every question, and needs no torch. Nothing that comes from the network is unpickled or run.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

_MOST_BYTES = 1 << 20
"""Of a line: a stranger may connect too."""


class StoreLostError(ConnectionError):
    """The supervisor that serves the store does not answer."""


class StoreServer:
    """Serves from its constructor until the process ends, each client in a thread of its own."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._lock = listener, threading.Lock()
        self._values: dict[str, Any] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Until the client leaves, or says what is no question."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError), connection:
            lines = connection.makefile("rb")
            while line := lines.readline(_MOST_BYTES):
                connection.sendall(json.dumps(self._answer(json.loads(line))).encode() + b"\n")

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

    def __init__(self, address: tuple[str, int], seconds_connect: float, seconds_call: float) -> None:
        self._place = "{}:{}".format(*address)
        self._socket = socket.create_connection(address, seconds_connect)
        self._socket.settimeout(seconds_call)
        self._lines = self._socket.makefile("rb")
        self.own_address = str(self._socket.getsockname()[0])
        """This host's, on the way to the server."""

    def set(self, key: str, value: Any) -> None:
        self._ask(do="set", key=key, value=value)

    def get(self, key: str) -> Any:
        """What is there, or None."""
        return self._ask(do="get", key=key)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(do="add", key=key, value=amount))

    def wait_at_most(self, seconds: float) -> None:
        """For each answer from now on."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def _ask(self, **question: Any) -> Any:
        try:
            self._socket.sendall(json.dumps(question).encode() + b"\n")
            line = self._lines.readline()
            if not line.endswith(b"\n"):
                raise ConnectionResetError("the connection was closed")
        except OSError as error:
            raise StoreLostError(f"lost {self._place} ({error})") from error
        return json.loads(line)
