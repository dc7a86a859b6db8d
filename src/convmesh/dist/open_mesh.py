"""Opening a mesh: the one place where process groups are made."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from convmesh.dist.agreement import agree
from convmesh.dist.heap import keep_freed_memory
from convmesh.dist.meeting import meet, telling_refusals
from convmesh.dist.traffic import Traffic
from convmesh.errors import DisagreementError, MeshError
from convmesh.layout import Mesh


class OpenMesh:
    """A mesh whose ranks are running processes, seen from one of them. Made by `open_mesh`, or dry by `dry_mesh`."""

    def __init__(
        self,
        mesh: Mesh,
        ranks: Sequence[int],
        rank: int,
        groups: dict[tuple[str, ...], dist.ProcessGroup],
        everyone: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.mesh = mesh
        self.world_ranks = ranks
        self.rank = rank
        self.everyone = everyone
        self.is_dry = everyone is None
        self.device = device
        self.traffic = Traffic()
        self.seeds = torch.Generator().manual_seed(0)
        self.overlap = True
        """Whether convolutions start before their halos arrive; off for debugging and comparison."""
        self.sub_batches = 1
        """Into how many parts samples are cut that travel to dense layers cut over their own axis."""
        self.replica_statistics = False
        """Whether batch norm takes its statistics within one data-parallel replica, not over the global batch."""
        self.weight_sums: Callable[[tuple[str, ...]], None] | None = None
        """Who sums weight gradients after backward, and is told over which axes; None: each layer does so at once."""
        self.device_meshes: dict[tuple[str, ...], DeviceMesh] = {}
        """torch's views of this mesh, by order of axes; see `dist.weights`."""
        self._groups = groups
        self._agreed: set[tuple[str, str]] = set()
        self.stages_through_host = device.type == "cuda" and dist.get_backend(everyone) == "gloo"

    def group(self, axes: Sequence[str]) -> dist.ProcessGroup:
        """The ranks that differ from this one on `axes` only."""
        return self._groups[tuple(name for name in self.mesh.axes if name in axes)]

    def background(self, axes: Sequence[str]) -> dist.ProcessGroup:
        """The same ranks once more, for what goes on behind other work: in one group, a few numbers that a layer waits
        for would queue behind megabytes of gradients. Opened when all of them first ask for it."""
        return _group(tuple(self.world_rank(rank) for rank in self.mesh.group(axes, self.rank)), in_background=True)

    def world_rank(self, rank: int) -> int:
        """The rank in the whole job of a rank of this mesh."""
        return self.world_ranks[rank]

    def members(self, axes: Sequence[str]) -> list[int]:
        """The ranks of `group(axes)` in the group's own order, which is the job's."""
        return sorted(self.mesh.group(axes, self.rank), key=self.world_rank)

    def weight_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes over which a layer must itself sum its weights' gradients, when its work is cut along `axes`."""
        if self.weight_sums is None:
            return axes
        self.weight_sums(axes)
        return ()

    def agree(self, what: str, value: str, problem: str | None = None) -> None:
        """Raise on every rank if any rank has a `problem`, or another `value` than the others."""
        if self.everyone is not None:
            agree(self.everyone, self.world_ranks, what, value, problem)
        elif problem:
            raise DisagreementError(f"{what}: {problem}")

    def agree_once(self, what: str, value: str) -> None:
        """`agree` when `value` first comes up: a check at the start that costs later steps nothing."""
        if (what, value) not in self._agreed:
            self.agree(what, value)
            self._agreed.add((what, value))


def init(seconds_timeout: float = 600.0) -> None:
    """Join the job that torchrun (or `srun` with its variables) started; alone without one. NCCL on GPUs, else Gloo."""
    if dist.is_initialized():
        return
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    one_gpu_each = torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here
    if one_gpu_each:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=seconds_timeout)
    if int(os.environ["WORLD_SIZE"]) == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if one_gpu_each else "gloo", store=store, rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group("nccl" if one_gpu_each else "gloo", timeout=timeout)
    _timeouts[dist.group.WORLD] = timeout


def open_mesh(mesh: Mesh, ranks: Sequence[int] | None = None, device: torch.device | str | None = None) -> OpenMesh:
    """Open the process groups of a mesh over `ranks` of the job (default: all). Call it on each of those ranks."""
    if not dist.is_initialized():
        raise MeshError("`open_mesh` needs a process group; call `convmesh.init()` first.")
    members = tuple(range(dist.get_world_size())) if ranks is None else tuple(ranks)
    with telling_refusals():
        _check_members(members)
    meet(members, f"{mesh} over {_listed(members)}", _timeouts.get(dist.group.WORLD))
    everyone = _group(members)
    # Before any group is opened along axes: ranks that disagree about them would wait for each other there.
    agree(everyone, members, "`mesh`", f"{mesh} over {_listed(members)}")
    with telling_refusals():
        _check_size(mesh, members, given=ranks is not None)
    here, where = members.index(dist.get_rank()), _device(device, everyone)
    if where.type == "cpu":
        keep_freed_memory()
    return OpenMesh(mesh, members, here, _open_groups(mesh, members), everyone, where)


def dry_mesh(mesh: Mesh, rank: int = 0) -> OpenMesh:
    """One rank's view of a mesh of any size without processes.

    Tensors on it live on the meta device; what would be sent is counted, and arrives without values.
    """
    if not 0 <= rank < mesh.size:
        raise MeshError(f"`rank` (={rank}) must be one of the {mesh.size} ranks of {mesh}: 0 to {mesh.size - 1}.")
    return OpenMesh(mesh, range(mesh.size), rank, {}, None, torch.device("meta"))


def _check_members(members: tuple[int, ...]) -> None:
    ranks = dist.get_world_size()
    if len(set(members)) != len(members) or not set(members) <= set(range(ranks)):
        raise MeshError(f"`ranks` (={members}) must be different ranks of this job, which has 0 to {ranks - 1}.")
    if dist.get_rank() not in members:
        raise MeshError(f"rank {dist.get_rank()} opens a mesh over {_listed(members)}; call it on those ranks only.")


def _check_size(mesh: Mesh, members: tuple[int, ...], given: bool) -> None:
    if mesh.size != len(members):
        whose = "ranks given" if given else "ranks of this job"
        raise MeshError(
            f"`mesh` (={mesh}) has {mesh.size} ranks, but there are {len(members)} {whose}; "
            f"make the product of its axes {len(members)}, e.g. Mesh(data={len(members)})."
        )


def _listed(members: tuple[int, ...]) -> str:
    if len(members) > 2 and members == tuple(range(members[0], members[-1] + 1)):
        return f"ranks {members[0]} to {members[-1]}"
    return f"ranks {', '.join(map(str, members))}"


def _open_groups(mesh: Mesh, members: tuple[int, ...]) -> dict[tuple[str, ...], dist.ProcessGroup]:
    """A group for every set of axes, because statistics and gradients are summed over any of them."""
    here = members.index(dist.get_rank())
    subsets = (s for n in range(1, len(mesh.axes) + 1) for s in itertools.combinations(mesh.axes, n))
    return {axes: _group(tuple(members[r] for r in mesh.group(axes, here))) for axes in subsets}


_opened: dict[tuple[object, tuple[int, ...], bool], dist.ProcessGroup] = {}
"""Groups by job, members and use: meshes over the same ranks share connections."""

_timeouts: dict[object, timedelta] = {}
"""How long jobs wait for a rank: torch gives a new group its own default, not the job's."""


def _group(members: tuple[int, ...], in_background: bool = False) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    ranks = tuple(sorted(members))
    if ranks == tuple(range(dist.get_world_size())) and not in_background:
        return world
    key = (world, ranks, in_background)
    if key not in _opened:
        _opened[key] = dist.new_group(list(ranks), timeout=_timeouts.get(world), use_local_synchronization=True)
    return _opened[key]


def _device(device: torch.device | str | None, group: dist.ProcessGroup) -> torch.device:
    if device is not None:
        return torch.device(device)
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
