"""The ranks of one generation: those that run from one restart to the next."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # netdevice(7)


@dataclass(frozen=True)
class World:
    """A generation, seen from one host."""

    ranks: int
    wanted: int
    """How many ranks the run was started with."""
    slots: tuple[int, ...]
    """This host's slots, one per rank here; a slot keeps its GPU, whatever the rank's number."""
    first: int = 0
    """The rank of the first slot."""
    address: str = LOOPBACK
    port: int = 0
    here: str = LOOPBACK
    """The address of this host that leads to the others."""
    has_other_hosts: bool = False

    def environment(self, index: int) -> dict[str, str]:
        """The variables by which the rank in slot `slots[index]` finds the others."""
        threads = max(1, len(os.sched_getaffinity(0)) // len(self.slots))
        defaults = {"OMP_NUM_THREADS": str(threads)}
        if interface := interface_of(self.here):  # a host's name may resolve to an address that others cannot reach
            defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        place = {
            "RANK": self.first + index, "WORLD_SIZE": self.ranks,
            "LOCAL_RANK": self.slots[index], "LOCAL_WORLD_SIZE": len(self.slots),
            "MASTER_ADDR": self.address, "MASTER_PORT": self.port,
        }  # fmt: skip
        return {**defaults, **os.environ, **{name: str(value) for name, value in place.items()}}


def free_port(address: str = LOOPBACK) -> int:
    """A port that nobody listens on now."""
    with socket.create_server((address, 0)) as listener:
        return int(listener.getsockname()[1])


def interface_of(address: str) -> str:
    """The name of the network interface with an IPv4 address; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return ""
