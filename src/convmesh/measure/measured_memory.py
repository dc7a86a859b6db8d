"""What a rank of this machine really holds at most in a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

import convmesh as cm
from convmesh.lowering.live_bytes import HeldStorages
from convmesh.models.reference import Reference
from convmesh.models.task import Task
from convmesh.oracle.memory.peak import Memory, memory_of


class MemoryMeter(Protocol):
    """Counts bytes of tensors that are made inside its block."""

    @property
    def block(self) -> AbstractContextManager[Any]: ...

    def start(self) -> None:
        """Look for the peak from here on."""

    @property
    def bytes_peak(self) -> int: ...

    @property
    def bytes_reserved(self) -> int:
        """What the allocator took from the device for it."""


class HostMeter:
    """Exact: each storage from the operator that makes it to its end. What operators use inside is not seen."""

    def __init__(self) -> None:
        self.block = self._storages = HeldStorages("cpu")

    def start(self) -> None:
        self._storages.start()

    @property
    def bytes_peak(self) -> int:
        return self._storages.bytes_peak

    @property
    def bytes_reserved(self) -> int:
        return self.bytes_peak


class DeviceMeter:
    """The caching allocator's own count, less what there was before; workspace of operators is in it."""

    def __init__(self, device: torch.device) -> None:
        self.block: AbstractContextManager[Any] = nullcontext()
        self._device = device
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_allocated(device)

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def bytes_peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before

    @property
    def bytes_reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)


def meter_for(device: torch.device) -> MemoryMeter:
    return DeviceMeter(device) if device.type == "cuda" else HostMeter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A reference network to train on some ranks: the global batch's `shape`, how it is split, and what it is of."""

    model: str
    shape: tuple[int, ...]
    strategy: str
    axes: Mapping[str, int]
    dtype: str = "float32"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Of the network, where they are not the published ones."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the plan."""

    @property
    def mesh(self) -> cm.Mesh:
        return cm.Mesh(**self.axes)


@dataclass(frozen=True, slots=True)
class Peak:
    """Measured on one rank, beside what its program says."""

    bytes_peak: int
    bytes_reserved: int
    predicted: Memory

    @property
    def error(self) -> float:
        """Of the prediction, as a fraction of what was measured."""
        return self.predicted.bytes_peak / self.bytes_peak - 1


def measure_training(training: Training, device: str = "cpu", steps: int = 2) -> Peak:
    """The peak of the last of some steps on this rank of a job; call it on every rank of the mesh."""
    where = torch.device(device)
    meter = meter_for(where)
    with meter.block:
        step, net = _trained(training, where)
        for _ in range(steps):
            meter.start()
            step()
        found = meter.bytes_peak, meter.bytes_reserved
    return Peak(*found, memory_of(net.program, device=where.type, staged=net.mesh.stages_through_host))


def _trained(training: Training, device: torch.device) -> tuple[Callable[[], None], Any]:
    """A step of a network in training, and the network."""
    torch.manual_seed(0)
    reference, dtype = cm.models.find(training.model), getattr(torch, training.dtype)
    model = reference.create(**training.sizes).to(dtype)
    plan = cm.plan(model, training.shape, training.mesh, training.strategy, **training.options)
    opened = cm.open_mesh(training.mesh, device=device)
    task = _task(reference, training.sizes)
    net = cm.parallelize(model, plan, loss=task.loss(), mesh=opened)
    args = _batch(net, task, training.shape, dtype)
    optimizer = net.optimizer(torch.optim.SGD, lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        net(*args).backward()
        optimizer.step()

    return step, net


def _task(reference: Reference, sizes: Mapping[str, Any]) -> Task:
    count = sizes.get("classes", sizes.get("outputs", reference.task.count))
    return Task(reference.task.kind, count, reference.task.coarser)


def _batch(net: Any, task: Task, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's shards; the global tensors are gone when they are made."""
    target = task.draw_target(shape)
    target = target.to(dtype) if target.is_floating_point() else target
    return net.shard_input(torch.randn(*shape, dtype=dtype)), net.shard_target(target)
