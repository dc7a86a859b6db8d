"""Measures the peak memory of a rank in a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

import convmesh as cm
from convmesh.lowering.dry_precision import autocast_for
from convmesh.lowering.live_bytes import HeldStorages
from convmesh.models.reference import Reference
from convmesh.models.task import Task
from convmesh.oracle.memory.peak import Memory, memory_of
from convmesh.plans.plan import Precision


class MemoryMeter(Protocol):
    """Counts bytes of tensors created inside its block."""

    @property
    def block(self) -> AbstractContextManager[Any]: ...

    def start(self) -> None:
        """Start looking for the peak."""

    @property
    def bytes_peak(self) -> int: ...

    @property
    def bytes_reserved(self) -> int:
        """Bytes that the allocator took from the device."""


class HostMeter:
    """Counts each storage exactly, from its creation to its end. Workspace inside operators is not visible."""

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
    """Reads the caching allocator's count, less what was there before; includes operators' workspace."""

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
    """How to train a reference network on several ranks: the global batch's `shape`, the split and the number type."""

    model: str
    shape: tuple[int, ...]
    strategy: str
    axes: Mapping[str, int]
    dtype: str = "float32"
    precision: Precision = ""
    """Autocast, or else the type of the weights."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the network that differ from the published ones."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the plan."""

    @property
    def mesh(self) -> cm.Mesh:
        return cm.Mesh(**self.axes)


@dataclass(frozen=True, slots=True)
class Peak:
    """The measured peak of one rank, with the predicted one."""

    bytes_peak: int
    bytes_reserved: int
    predicted: Memory

    @property
    def error(self) -> float:
        """Error of the prediction, as a fraction of the measured peak."""
        return self.predicted.bytes_peak / self.bytes_peak - 1


def measure_training(training: Training, device: str = "cpu", steps: int = 2) -> Peak:
    """The peak of the last of `steps` steps on this rank; call it on every rank of the mesh."""
    target_device = torch.device(device)
    meter = meter_for(target_device)
    with meter.block:
        step, net = _trained(training, target_device)
        for _ in range(steps):
            meter.start()
            step()
        peaks = meter.bytes_peak, meter.bytes_reserved
    return Peak(*peaks, memory_of(net.program, device=target_device.type, staged=net.mesh.stages_through_host))


def _trained(training: Training, device: torch.device) -> tuple[Callable[[], None], Any]:
    """A function that runs one training step, and the network."""
    torch.manual_seed(0)
    reference, dtype = cm.models.find(training.model), getattr(torch, training.dtype)
    model = reference.create(**training.sizes).to(dtype)
    plan = cm.plan(
        model, training.shape, training.mesh, training.strategy, precision=training.precision, **training.options
    )
    opened = cm.open_mesh(training.mesh, device=device)
    task = _task(reference, training.sizes)
    net = cm.parallelize(model, plan, loss=task.loss(), mesh=opened)
    args = _batch(net, task, training.shape, dtype)
    cast = autocast_for(plan, device)
    optimizer = net.optimizer(torch.optim.SGD, lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        with cast:
            loss = net(*args)
        loss.backward()
        optimizer.step()

    return step, net


def _task(reference: Reference, sizes: Mapping[str, Any]) -> Task:
    count = sizes.get("classes", sizes.get("outputs", sizes.get("predicted", reference.task.count)))
    return Task(reference.task.kind, count, reference.task.coarser)


def _batch(net: Any, task: Task, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's shards; the global tensors are freed on return."""
    target = task.draw_target(shape)
    target = target.to(dtype) if target.is_floating_point() else target
    return net.shard_input(torch.randn(*shape, dtype=dtype)), net.shard_target(target)
