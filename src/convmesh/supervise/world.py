"""The ranks of one generation: those that run from one restart to the next."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class World:
    """A generation, seen from one host."""

    ranks: int
    wanted: int
    """How many the run was started with."""
    slots: tuple[int, ...]
    """Of this host, one for each rank here; a slot keeps its GPU, whatever the rank's number."""
    first: int = 0
    """The rank of the first slot."""
    address: str = LOOPBACK
    port: int = 0
    has_other_hosts: bool = False

    def environment(self, index: int) -> dict[str, str]:
        """The variables by which the rank in slot `slots[index]` finds the others."""
        threads = max(1, len(os.sched_getaffinity(0)) // len(self.slots))
        defaults = {"OMP_NUM_THREADS": str(threads)}
        if self.address == LOOPBACK:
            defaults["GLOO_SOCKET_IFNAME"] = "lo"
        place = {
            "RANK": self.first + index, "WORLD_SIZE": self.ranks,
            "LOCAL_RANK": self.slots[index], "LOCAL_WORLD_SIZE": len(self.slots),
            "MASTER_ADDR": self.address, "MASTER_PORT": self.port,
        }  # fmt: skip
        return {**defaults, **os.environ, **{name: str(value) for name, value in place.items()}}


def free_port(address: str = LOOPBACK) -> int:
    """A port on which nobody listens now."""
    with socket.create_server((address, 0)) as listener:
        return int(listener.getsockname()[1])
