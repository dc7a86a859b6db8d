"""Collectives on flat buffers that are kept from step to step: in place, in the background of other work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from convmesh.dist.exchange import _gather_equal as gather_equal
from convmesh.dist.lost_ranks import await_work, posted
from convmesh.dist.open_mesh import OpenMesh
from convmesh.dist.traffic import all_reduce_bytes
from convmesh.dist.transfer_watch import TransferNote, noted

# torch 2.13 renamed the collective and warns about the name that 2.11 has.
_scatter_equal = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Axes = tuple[str, ...]


class FlatBuffer:
    """Values on the mesh's device, and a copy on the host if messages leave from there."""

    def __init__(self, elements: int, dtype: torch.dtype, mesh: OpenMesh) -> None:
        self.values = torch.zeros(elements, dtype=dtype, device=mesh.device)
        staged = mesh.stages_through_host
        self.wire = torch.zeros(elements, dtype=dtype, pin_memory=True) if staged else self.values

    def split(self, sizes: Sequence[int]) -> list[FlatBuffer]:
        """Consecutive parts of the buffer, which share its memory."""
        wires = self.wire.split(list(sizes))
        return [self._over(values, wire) for values, wire in zip(self.values.split(list(sizes)), wires, strict=True)]

    def _over(self, values: torch.Tensor, wire: torch.Tensor) -> FlatBuffer:
        part = FlatBuffer.__new__(FlatBuffer)
        part.values, part.wire = values, values if self.wire is self.values else wire
        return part

    def to_wire(self) -> torch.Tensor:
        return self.wire if self.wire is self.values else self.wire.copy_(self.values)

    def from_wire(self) -> None:
        if self.wire is not self.values:
            self.values.copy_(self.wire)


class Flight:
    """A collective in progress; `wait` leaves its result in the receiving buffer."""

    def __init__(self, work: Any = None, receiver: FlatBuffer | None = None, note: TransferNote | None = None) -> None:
        self._work = work
        self._receiver = receiver
        self._note = note

    def wait(self) -> None:
        if self._note is not None:
            self._note.needed()
        if self._work is not None:
            await_work(self._work)
        if self._note is not None:
            self._note.arrived()
        if self._receiver is not None:
            self._receiver.from_wire()
        self._work = self._receiver = self._note = None


def start_sum(buffer: FlatBuffer, mesh: OpenMesh, axes: Axes) -> Flight:
    """Sum a buffer over the ranks along `axes`, in place on each of them."""
    ranks = mesh.mesh.extent(axes)
    bytes_sent = all_reduce_bytes(buffer.values.numel(), buffer.values.element_size(), ranks)
    return _start(
        mesh, axes, "all_reduce", bytes_sent, buffer,
        lambda group: dist.all_reduce(buffer.to_wire(), group=group, async_op=True),
    )  # fmt: skip


def start_sum_at_root(buffer: FlatBuffer, mesh: OpenMesh, axes: Axes) -> Flight:
    """Sum a buffer over the ranks along `axes`, in place on the first of them; on the others it is then undefined."""
    root = root_of(mesh, axes)
    bytes_sent = 0 if root == mesh.rank else buffer.values.nbytes
    return _start(
        mesh, axes, "reduce", bytes_sent, buffer,
        lambda group: dist.reduce(buffer.to_wire(), mesh.world_rank(root), group=group, async_op=True),
    )  # fmt: skip


def start_broadcast(buffer: FlatBuffer, mesh: OpenMesh, axes: Axes) -> Flight:
    """Copy the first rank's buffer to the others along `axes`. Counted as a chain: all but the last pass it on."""
    root = root_of(mesh, axes)
    here = mesh.mesh.coordinates(mesh.rank)
    is_last = all(here[axis] == mesh.mesh.axes[axis] - 1 for axis in axes if axis in here)
    bytes_sent = 0 if is_last else buffer.values.nbytes
    return _start(
        mesh, axes, "broadcast", bytes_sent, buffer,
        lambda group: dist.broadcast(buffer.to_wire(), mesh.world_rank(root), group=group, async_op=True),
    )  # fmt: skip


def start_sum_scatter(part: FlatBuffer, whole: FlatBuffer, mesh: OpenMesh, axes: Axes) -> Flight:
    """Sum a buffer of one equal part per rank along `axes`; this rank receives its part."""
    bytes_sent = part.values.nbytes * (mesh.mesh.extent(axes) - 1)
    return _start(
        mesh, axes, "reduce_scatter", bytes_sent, part,
        lambda group: _scatter_equal(part.wire, whole.to_wire(), group=group, async_op=True),
    )  # fmt: skip


def start_gather(whole: FlatBuffer, part: FlatBuffer, mesh: OpenMesh, axes: Axes) -> Flight:
    """Concatenate the equal parts of the ranks along `axes`, on each of them."""
    bytes_sent = part.values.nbytes * (mesh.mesh.extent(axes) - 1)
    return _start(
        mesh, axes, "all_gather", bytes_sent, whole,
        lambda group: gather_equal(whole.wire, part.to_wire(), group=group, async_op=True),
    )  # fmt: skip


def root_of(mesh: OpenMesh, axes: Axes) -> int:
    """The first rank along `axes` among those that share this rank's other coordinates."""
    here = mesh.mesh.coordinates(mesh.rank)
    return mesh.mesh.rank({axis: 0 if axis in axes else place for axis, place in here.items()})


def _start(
    mesh: OpenMesh,
    axes: Axes,
    carrier: str,
    bytes_sent: int,
    receiver: FlatBuffer,
    post: Callable[[dist.ProcessGroup], Any],
) -> Flight:
    if mesh.mesh.extent(axes) == 1:
        return Flight()
    if bytes_sent:
        mesh.traffic.record(carrier, bytes_sent, axes)
    if mesh.is_dry:
        return Flight()
    work = posted(post, mesh.background(axes))
    return Flight(work, receiver, noted([work], carrier, axes))
