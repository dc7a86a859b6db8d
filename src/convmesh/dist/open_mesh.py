"""Opening a mesh: the one place where process groups are made."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from convmesh.dist.agreement import Tell, agree, agree_on_lists
from convmesh.dist.heap import keep_freed_memory
from convmesh.dist.host_lines import BYTES_MOST, HostLine
from convmesh.dist.job_store import job_store
from convmesh.dist.meeting import NO_TIMEOUT, meet, telling_refusals
from convmesh.dist.new_groups import new_group
from convmesh.dist.opening_lines import open_lines
from convmesh.dist.step_settings import StepSettings
from convmesh.dist.thread_policy import let_computing_go_on
from convmesh.dist.traffic import Traffic
from convmesh.errors import DisagreementError, MeshError
from convmesh.launchers import job_place
from convmesh.layout import Mesh

Backend = Literal["nccl", "gloo"]


@dataclass(frozen=True, eq=False)
class OpenMesh:
    """A mesh whose ranks are running processes, seen from one of them. Made by `open_mesh`, or dry by `dry_mesh`.

    `with_settings` and `cut_as` give other views of the same mesh: all share groups, seeds, counters and device meshes.
    """

    mesh: Mesh
    world_ranks: Sequence[int]
    rank: int
    everyone: dist.ProcessGroup | None
    """All ranks of the mesh; None on a dry mesh."""
    device: torch.device
    groups: Mapping[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict, repr=False)
    lines: Mapping[int, HostLine] = field(default_factory=dict, repr=False)
    """To ranks of this host, by their rank in the job, for small messages past the backend."""
    stages_through_host: bool = False
    """Whether messages leave from the host's memory, because the backend cannot send from the device's."""
    stands_for: str = ""
    """The kind of device, `cpu` or `cuda`, whose kernels tensors without data stand for."""
    settings: StepSettings = field(default_factory=StepSettings)
    traffic: Traffic = field(default_factory=Traffic, repr=False)
    seeds: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), repr=False)
    device_meshes: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, repr=False)
    """torch's views of this mesh, by their axes; see `dist.cut_weights`."""
    left_partial: list[tuple[str, ...]] | None = field(default=None, repr=False)
    """In a dry run: lists the axes along which layers left weight gradients partial."""
    _agreed: set[tuple[str, str]] = field(default_factory=set, repr=False)

    @property
    def is_dry(self) -> bool:
        return self.everyone is None

    @property
    def wire_device(self) -> torch.device:
        """The device that messages leave from and arrive on."""
        return torch.device("cpu") if self.stages_through_host else self.device

    def with_settings(self, settings: StepSettings) -> OpenMesh:
        """The same mesh for layers that run with other settings."""
        return replace(self, settings=settings)

    def cut_as(self, mesh: Mesh) -> OpenMesh:
        """The same ranks, for tensors that are cut by the shares of `mesh`."""
        return self if mesh == self.mesh or mesh.even != self.mesh.even else replace(self, mesh=mesh)

    def device_kind(self, tensor: torch.Tensor) -> str:
        """The kind of device that a tensor is on; one without data stands for a tensor on the mesh's devices."""
        return self.stands_for if tensor.is_meta else tensor.device.type

    def group(self, axes: Sequence[str]) -> dist.ProcessGroup:
        """The ranks that differ from this one along `axes` only."""
        return self.groups[tuple(name for name in self.mesh.axes if name in axes)]

    def background(self, axes: Sequence[str]) -> dist.ProcessGroup:
        """A second group of the same ranks, for transfers in the background. In one group, a few numbers that a layer
        waits for would queue behind megabytes of gradients. Opened when all of its ranks first ask for it."""
        return _group(tuple(self.world_rank(rank) for rank in self.mesh.group(axes, self.rank)), in_background=True)

    def on_host(self, purpose: str) -> dist.ProcessGroup:
        """A group of all ranks that sends from the host's memory, for samples that are not on the devices yet. Each
        purpose has its own group, so that threads do not mix messages. Opened when all ranks first ask for it."""
        return _group(tuple(self.world_ranks), in_background=True, on_host_for=purpose)

    def world_rank(self, rank: int) -> int:
        """The rank in the job of one of this mesh's ranks."""
        return self.world_ranks[rank]

    def line(self, rank: int, bytes_message: int) -> HostLine | None:
        """What carries a message between this rank and another one of this mesh; None if the backend does."""
        return self.lines.get(self.world_rank(rank)) if bytes_message <= BYTES_MOST else None

    def members(self, axes: Sequence[str]) -> list[int]:
        """The ranks of `group(axes)` in the group's order, which is that of the job."""
        return sorted(self.mesh.group(axes, self.rank), key=self.world_rank)

    def weight_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes over which a layer must itself sum its weights' gradients, when its work is cut along `axes`."""
        if self.settings.sums_weights:
            return axes
        if self.left_partial is not None:
            self.left_partial.append(axes)
        return ()

    def agree(self, what: str, value: str, problem: str | None = None) -> None:
        """Raise on every rank if any rank has a `problem`, or if their `value`s differ."""
        if self.everyone is not None:
            agree(self.everyone, self.world_ranks, what, value, problem)
        elif problem:
            raise DisagreementError(f"{what}: {problem}")

    def agree_on_lists(self, what: str, lists: Mapping[str, Sequence[str]], told: Tell) -> None:
        """Raise on every rank if lists that ranks have under one name differ; `told` says where."""
        if self.everyone is not None:
            agree_on_lists(self.everyone, self.world_ranks, what, lists, told)

    def agree_once(self, what: str, value: str) -> None:
        """`agree` on each `value` once: a check in the first step that costs later ones nothing."""
        if (what, value) not in self._agreed:
            self.agree(what, value)
            self._agreed.add((what, value))


def init(seconds_timeout: float = 600.0, backend: Backend | None = None) -> None:
    """Join the job that torchrun, `srun`, `mpirun` or `flux run` started, or run alone.

    The default is NCCL if every rank here has its own GPU, else Gloo; `backend` asks for one of them.
    """
    join_job(seconds_timeout, backend, lambda: None)


def join_job(seconds_timeout: float, backend: Backend | None, have_met: Callable[[], None]) -> None:
    """`init`, which calls `have_met` when all ranks are at the job's store, and nothing is left but to connect them."""
    _check_backend(backend)
    if dist.is_initialized():
        return
    os.environ.update(job_place(os.environ))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    chosen = backend or ("nccl" if _one_gpu_each() else "gloo")
    if chosen == "nccl":
        _take_gpu()
    timeout = timedelta(seconds=seconds_timeout)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.HashStore() if ranks == 1 else job_store(os.environ, timeout)  # type: ignore[attr-defined]
    if store is None:  # torch lets them meet
        dist.init_process_group(chosen, timeout=timeout)
    else:
        have_met()
        dist.init_process_group(chosen, store=store, rank=rank, world_size=ranks, timeout=timeout)
    _timeouts[dist.group.WORLD] = timeout


def _check_backend(backend: str | None) -> None:
    if backend not in (None, "nccl", "gloo"):
        raise MeshError(f"`backend` (={backend!r}) must be 'nccl' (GPUs) or 'gloo' (CPUs, or GPUs through the host).")
    if backend == "nccl" and not torch.cuda.is_available():
        raise MeshError("`backend` (='nccl') needs a GPU, and torch sees none here; use backend='gloo'.")


def _one_gpu_each() -> bool:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    return torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here


def _take_gpu() -> None:
    """Ranks take this machine's GPUs in turn; NCCL itself says whether several may share one."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


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
        let_computing_go_on()
    through_host = where.type == "cuda" and dist.get_backend(everyone) != "nccl"
    groups, lines = _open_groups(mesh, members), _open_lines(everyone, members) if where.type == "cpu" else {}
    return OpenMesh(mesh, members, here, everyone, where, groups, lines, through_host, where.type)


def dry_mesh(mesh: Mesh, rank: int = 0, device: str = "cuda") -> OpenMesh:
    """One rank's view of a mesh of any size, without processes.

    Its tensors are on the meta device. Messages are counted, and arrive without values. Operators choose the kernels
    of `device`, which is `cpu` or `cuda`.
    """
    if not 0 <= rank < mesh.size:
        raise MeshError(f"`rank` (={rank}) must be one of the {mesh.size} ranks of {mesh}: 0 to {mesh.size - 1}.")
    return OpenMesh(mesh, range(mesh.size), rank, everyone=None, device=torch.device("meta"), stands_for=device)


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


def _open_lines(everyone: dist.ProcessGroup, members: tuple[int, ...]) -> dict[int, HostLine]:
    return open_lines(everyone, members, (_timeouts.get(dist.group.WORLD) or NO_TIMEOUT).total_seconds())


_opened: dict[tuple[object, tuple[int, ...], bool, str], dist.ProcessGroup] = {}
"""Process groups by job, members and use: meshes over the same ranks share connections."""

_timeouts: dict[object, timedelta] = {}
"""Each job's time-out: torch gives a new group its default, not the job's."""


def _group(members: tuple[int, ...], in_background: bool = False, on_host_for: str = "") -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    ranks = tuple(sorted(members))
    if ranks == tuple(range(dist.get_world_size())) and not in_background:
        return world
    key = (world, ranks, in_background, on_host_for)
    if key not in _opened:
        _opened[key] = new_group(ranks, _timeouts.get(world), on_host=bool(on_host_for))
    return _opened[key]


def _device(device: torch.device | str | None, group: dist.ProcessGroup) -> torch.device:
    if device is not None:
        return torch.device(device)
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
