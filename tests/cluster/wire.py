"""A link as a process, for kernels without netem: carries packets between two TAP devices, late, slowly, or not at all.

python -m tests.cluster.wire TAP TAP [--whole]: reads a Link as a line of JSON from its input, whenever that changes.

With --whole, a sender hands over up to 64 KB at once, as to a network card that cuts packets itself: far fewer turns of
this process, so that it keeps up with gigabits. Such a parcel takes as long as all its packets with their headers.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import json
import os
import select
import struct
import sys
import time
from collections.abc import Callable

from tests.cluster.line import Line, Link

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x400454CA, 0x0002, 0x1000, 0x4000  # linux/if_tun.h
_TUNSETOFFLOAD, _TUN_F_CSUM, _TUN_F_TSO4 = 0x400454D0, 0x01, 0x02
_BYTES_MOST = 65700
_PARCEL = struct.Struct("<BBHHHH")
"""What precedes a parcel (struct virtio_net_hdr): flags, kind, bytes of headers, data of each packet, checksum."""


def opened(name: str, whole: bool = False) -> int:
    """A new TAP device; it may move to another namespace while we hold it."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | (_IFF_VNET_HDR if whole else 0)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    if whole:
        fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return device


def bytes_on_wire(parcel: bytes) -> int:
    """Of the packets that a card would make of a parcel, each with the headers."""
    _, kind, bytes_headers, bytes_each, _, _ = _PARCEL.unpack_from(parcel)
    size = len(parcel) - _PARCEL.size
    return size + (-(-(size - bytes_headers) // bytes_each) - 1) * bytes_headers if kind else size


class Wire:
    """Two lines, one for each direction, and the packets on their way."""

    def __init__(self, ends: tuple[int, int], size: Callable[[bytes], int] = len) -> None:
        self._size = size
        self._lines = {end: Line(Link(), seed) for seed, end in enumerate(ends)}
        self._other = {ends[0]: ends[1], ends[1]: ends[0]}
        self._flying: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()

    def carry(self) -> None:
        """Until the input ends."""
        while True:
            wait = self._flying[0][0] - time.monotonic() if self._flying else None
            ready, _, _ = select.select([*self._other, sys.stdin], [], [], wait and max(0.0, wait))
            if sys.stdin in ready and not self._changed():
                return
            for end in self._other.keys() & {*ready}:
                self._take(end)
            self._deliver()

    def _changed(self) -> bool:
        line = sys.stdin.readline()
        for each in self._lines.values():
            each.link = Link(**json.loads(line)) if line else Link()
        sys.stdout.write("changed\n")
        sys.stdout.flush()
        return bool(line)

    def _take(self, end: int) -> None:
        with contextlib.suppress(OSError):  # nothing more, or the device is down
            while packet := os.read(end, _BYTES_MOST):
                due = self._lines[end].arrival(time.monotonic(), self._size(packet))
                if due is not None:
                    heapq.heappush(self._flying, (due, next(self._numbers), self._other[end], packet))

    def _deliver(self) -> None:
        while self._flying and self._flying[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(self._flying)
            with contextlib.suppress(OSError):  # the other end is down
                os.write(end, packet)


if __name__ == "__main__":
    is_whole = "--whole" in sys.argv
    devices = opened(sys.argv[1], is_whole), opened(sys.argv[2], is_whole)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    Wire(devices, bytes_on_wire if is_whole else len).carry()
