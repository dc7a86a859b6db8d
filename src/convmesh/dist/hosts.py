"""Which ranks share a host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch.distributed as dist

from convmesh.dist.agreement import told_by_all
from convmesh.dist.open_mesh import OpenMesh
from convmesh.dist.told_values import values_of_all
from convmesh.errors import PlanError

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_host() -> str:
    """The host's name, and what distinguishes it from others of that name: only processes that share memory agree."""
    return f"{socket.gethostname()} {_BOOT.read_text().strip() if _BOOT.exists() else ''}"


def hosts_of_job() -> list[str]:
    """The host of each rank of the job; all ranks call it."""
    return values_of_all(dist.group.WORLD, dist.get_world_size(), this_host())


def ranks_on_each(hosts: Sequence[str]) -> int:
    """The number of ranks on each host, if it is the same for all and a host's ranks are consecutive; else 1."""
    runs = [(host, len([*ranks])) for host, ranks in groupby(hosts)]
    sizes = {size for _, size in runs}
    return sizes.pop() if len(sizes) == 1 and len({host for host, _ in runs}) == len(runs) else 1


def check_hosts(mesh: OpenMesh, ranks_per_host: int) -> None:
    """Refuse, on all ranks, a mesh with a run of `ranks_per_host` ranks on several hosts; a host may have many runs."""
    if ranks_per_host == 1 or mesh.everyone is None:
        return
    hosts = [*told_by_all(mesh.everyone, mesh.world_ranks, this_host()).values()]
    for first in range(0, len(hosts), ranks_per_host):
        on = dict.fromkeys(hosts[first : first + ranks_per_host])
        if len(on) > 1:
            here = ranks_on_each(hosts)
            other = f"`ranks_per_host={here}`" if here > 1 else "`reduction='bucketed'`"
            raise PlanError(
                f"the plan sums gradients inside hosts of {ranks_per_host} ranks (`ranks_per_host`), but of ranks "
                f"{first} to {first + ranks_per_host - 1} some are on "
                f"{' and some on '.join(host.split()[0] for host in on)}; make it with {other}."
            )
