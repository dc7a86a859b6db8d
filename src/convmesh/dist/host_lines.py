"""Small messages between ranks of one host: over a socket for each two of them, by the thread that computes.

Gloo hands every message to threads of its own on both sides. On processors with no core to spare these take turns with
the threads that compute, and a halo of a few rows costs more than the layer that waits for it. Here a message goes into
the socket's buffer when it is posted, and is read when it is awaited; the system keeps it meanwhile.

Messages of two ranks arrive in the order in which they were sent, so both must post them in one order, as they do
everywhere (docs/architecture.md, "The order of transfers"). A head before each one says what it is: ranks that differ
raise an error instead of taking one message for another.
"""

from __future__ import annotations

import ctypes
import select
import socket
import struct
import time
from collections import deque
from functools import cache
from typing import Any, NoReturn
from zlib import crc32

import torch

from convmesh.private_torch.tracing import without_modes

BYTES_MOST = 128 << 10
"""Of a message on a line; Gloo carries larger ones, which its threads move while this one computes."""

_HEAD = struct.Struct("<QI")
_BYTES_BUFFER = 4 << 20
"""Of the socket, where the system grants it."""

_unsent: set[HostLine] = set()
"""Lines whose buffers were full. What is left goes out whenever this rank waits for anything."""


class Passage:
    """One message on its way, to wait for as for torch's own; keeps its tensor alive."""

    def __init__(self, line: HostLine, head: bytearray, tensor: torch.Tensor) -> None:
        self.head, self._line, self._tensor = head, line, tensor
        self.parts = [memoryview(head), *([_bytes_of(tensor)] if tensor.nbytes else [])]
        """What has yet to be moved."""

    def moved(self, count: int) -> None:
        while self.parts and count >= len(self.parts[0]):
            count -= len(self.parts.pop(0))
        if count:
            self.parts[0] = self.parts[0][count:]

    @property
    def has_head(self) -> bool:
        return len(self.parts) < (2 if self._tensor.nbytes else 1)

    def is_completed(self) -> bool:
        return not self.parts

    def wait(self) -> None:
        if self.parts:
            self._line.finish(self)

    def get_future(self) -> NoReturn:
        raise NotImplementedError("a message on a line has no future: nobody moves it but who waits for it")


class HostLine:
    """This rank's end of the socket that it shares with another one."""

    def __init__(self, connection: socket.socket, seconds_timeout: float) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BYTES_BUFFER)
        self._connection, self._seconds_timeout = connection, seconds_timeout
        self._leaving: deque[Passage] = deque()
        self._arriving: deque[tuple[Passage, bytes]] = deque()

    def send(self, what: str, tensor: torch.Tensor) -> Passage:
        """Post a contiguous tensor; `what` it is, both ends say alike."""
        passage = Passage(self, bytearray(_HEAD.pack(tensor.nbytes, _digest(what))), tensor)
        self._leaving.append(passage)
        self._write()
        return passage

    def receive(self, what: str, tensor: torch.Tensor) -> Passage:
        """Post a contiguous tensor to be filled by the next message."""
        passage = Passage(self, bytearray(_HEAD.size), tensor)
        self._arriving.append((passage, _HEAD.pack(tensor.nbytes, _digest(what))))
        return passage

    def finish(self, passage: Passage) -> None:
        """Move messages until this one has passed."""
        deadline = time.monotonic() + self._seconds_timeout
        while True:
            self._read()
            self._write()
            if passage.is_completed():
                return
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise RuntimeError(f"timed out after {self._seconds_timeout:g} s")
            _await_any(self, seconds)

    def close(self) -> None:
        _unsent.discard(self)
        self._connection.close()

    def events(self) -> tuple[int, int]:
        """The socket, and what has to happen there."""
        reads, writes = (select.POLLIN if self._arriving else 0), (select.POLLOUT if self._leaving else 0)
        return self._connection.fileno(), reads | writes

    def _write(self) -> None:
        while self._leaving:
            passage = self._leaving[0]
            try:
                passage.moved(self._connection.sendmsg(passage.parts))
            except BlockingIOError:
                _unsent.add(self)
                return
            except OSError as error:
                raise RuntimeError(error.strerror) from error
            if passage.is_completed():
                self._leaving.popleft()
        _unsent.discard(self)

    def _read(self) -> None:
        while self._arriving:
            passage, expected = self._arriving[0]
            try:
                count = self._connection.recvmsg_into(passage.parts)[0]
            except BlockingIOError:
                return
            except OSError as error:
                raise RuntimeError(error.strerror) from error
            if not count:
                raise RuntimeError("it closed the connection")
            passage.moved(count)
            if passage.has_head and passage.head != expected:
                raise RuntimeError("it sent another message than this rank waits for")
            if passage.is_completed():
                self._arriving.popleft()


class LineSum:
    """The sum of this rank's buffer and another's, in place on both: of two there is but one, to the last bit."""

    def __init__(self, line: HostLine, what: str, buffer: torch.Tensor) -> None:
        self._buffer, self._other = buffer, torch.empty_like(buffer)
        self._passages = line.receive(what, self._other), line.send(what, buffer)
        self._is_added = False

    def is_completed(self) -> bool:
        return self._is_added

    def wait(self) -> None:
        for passage in self._passages:
            passage.wait()
        if not self._is_added:
            with without_modes():  # it is part of the transfer, as in Gloo, and no computation of the step
                self._buffer.add_(self._other)
            self._is_added = True

    def get_future(self) -> NoReturn:
        self._passages[0].get_future()


def send_on_while(work: Any) -> None:
    """Hand over what buffers had no room for, until that is done or `work`, which others may have to post, is."""
    while _unsent and not work.is_completed():
        for line in _ready({}, 0.001):
            line._write()


def _await_any(line: HostLine, seconds: float) -> None:
    """Until something can move on a line; meanwhile other lines send on."""
    for other in _ready({line.events()[0]: line}, seconds):
        if other is not line:
            other._write()


def _ready(lines: dict[int, HostLine], seconds: float) -> list[HostLine]:
    watched = {**{line.events()[0]: line for line in _unsent}, **lines}
    poll = select.poll()
    for line in watched.values():
        poll.register(*line.events())
    return [watched[number] for number, _ in poll.poll(1000 * seconds)]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Its memory, whatever the type of its values."""
    assert tensor.is_contiguous()
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


@cache
def _digest(what: str) -> int:
    return crc32(what.encode())
