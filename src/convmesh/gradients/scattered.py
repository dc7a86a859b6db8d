"""Buckets whose sums are scattered: each rank along `data` receives a part, updates it and sends it to the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from convmesh.dist import OpenMesh
from convmesh.dist.flat_buffers import FlatBuffer, Flight, start_gather, start_sum, start_sum_scatter
from convmesh.errors import UnsupportedError
from convmesh.gradients.buckets import Bucket, Slot
from convmesh.gradients.local_gradients import as_gradient_of, is_dense, local_of, shaped_like
from convmesh.gradients.owners import Axes, Held, distinct_axes, own, owner_of
from convmesh.gradients.reduction import AxesOf, GradientReducer
from convmesh.layout import Span
from convmesh.private_torch.tensor_internals import unseen_view

AXIS = "data"


@dataclass(frozen=True)
class ShardPiece:
    """A run of a parameter's values within one part of a bucket."""

    slot: Slot
    part: int
    start: int
    stop: int
    offset: int
    """Where the run begins in its part."""


def cut_into_pieces(slots: list[Slot], sizes: list[int], parts: int) -> tuple[list[ShardPiece], int]:
    """A bucket's values, cut in order into equal parts, and the size of a part; the last may end in padding."""
    part_size = -(-sum(sizes) // parts)
    pieces, begin = [], 0
    for slot, size in zip(slots, sizes, strict=True):
        done = 0
        while done < size:
            part, offset = divmod(begin + done, part_size)
            stop = min(size, done + part_size - offset)
            pieces.append(ShardPiece(slot, part, done, stop, offset))
            done = stop
        begin += size
    return pieces, part_size


class ScatteredBucket:
    """A sum-scatter along `data`, and an all-reduce of the received part along the other axes.

    Each part of the buffer ends with one count per parameter, as in a summed bucket: the number of ranks that have its
    gradient. `shards` are the runs of the parameters that this rank updates, in the parameters' own memory.
    """

    def __init__(self, slots: list[Slot], mesh: OpenMesh, axes: Axes, dtype: torch.dtype) -> None:
        self.slots, self.axes, self.mesh = slots, axes, mesh
        self.is_started = False
        self._parts = mesh.mesh.extent((AXIS,))
        self._here = mesh.members((AXIS,)).index(mesh.rank)
        self._others = tuple(axis for axis in axes if axis != AXIS)
        self._runs = {slot: _run(slot.parameter) for slot in slots}
        self._pieces, part_size = cut_into_pieces(slots, [run.numel() for run in self._runs.values()], self._parts)
        width = part_size + len(slots)
        self._sent, self._received = (FlatBuffer(n * width, dtype, mesh) for n in (self._parts, 1))
        self._counts = self._sent.values.view(self._parts, width)[:, part_size:]
        self._make_shards(width, part_size)
        kind = slots[0].parameter.dtype
        # Weights travel back in their own type, through the same buffers if the gradients have that type too.
        same = kind == dtype
        self._shown = self._received if same else FlatBuffer(width, kind, mesh)
        self._gathered = self._sent if same else FlatBuffer(self._parts * width, kind, mesh)
        self._width, self._part_size = width, part_size
        self._flight = Flight()

    def _make_shards(self, width: int, part_size: int) -> None:
        places: dict[Slot, list[tuple[ShardPiece, torch.Tensor]]] = {slot: [] for slot in self.slots}
        for piece in self._pieces:
            begin = piece.part * width + piece.offset
            places[piece.slot].append((piece, _part(self._sent.values, begin, begin + piece.stop - piece.start)))
        self._places = places
        self._mine = [piece for piece in self._pieces if piece.part == self._here]
        self.shards = {p.slot.parameter: nn.Parameter(self._runs[p.slot][p.start : p.stop]) for p in self._mine}
        self.spans = {self.shards[p.slot.parameter]: Span(p.start, p.stop) for p in self._mine}
        self._grads = {s: torch.zeros_like(s) for s in self.shards.values()}
        self._seen = self._received.values[part_size:]

    @property
    def elements(self) -> int:
        return self._sent.values.numel()

    @torch.no_grad()
    def take(self, slot: Slot) -> None:
        """Copy the gradient and free it at once: a rank needs only its part of the sum."""
        run = _run(slot.parameter, slot.gradient())
        for piece, place in self._places[slot]:
            place.copy_(_part(run, piece.start, piece.stop))
        slot.parameter.grad = slot.delivered = None

    def start(self) -> None:
        self._counts.copy_(torch.tensor([self._complete(slot) for slot in self.slots]).expand_as(self._counts))
        self.is_started = True
        self._flight = start_sum_scatter(self._received, self._sent, self.mesh, (AXIS,))

    def _complete(self, slot: Slot) -> bool:
        if slot.is_ready:
            return True
        slot.open_sum()
        if is_present := slot.parameter.grad is not None:
            self.take(slot)
        else:
            for _, place in self._places[slot]:
                place.zero_()
        return is_present

    def relay(self) -> None:
        self._flight.wait()
        self._flight = start_sum(self._received, self.mesh, self._others)

    def finish(self) -> None:
        self._flight.wait()
        is_used = dict(zip(self.slots, self._used(), strict=True))
        for piece in self._mine:
            if is_used[piece.slot]:
                self._add(self.shards[piece.slot.parameter], piece)
        for slot in self.slots:
            slot.is_ready = slot.is_partial = False
        self.is_started = False

    def _used(self) -> list[bool]:
        if all(slot.is_ready for slot in self.slots) or self.mesh.is_dry:
            return [True] * len(self.slots)
        return [count > 0 for count in self._seen.tolist()]

    def _add(self, shard: nn.Parameter, piece: ShardPiece) -> None:
        arrived = self._received.values[piece.offset : piece.offset + piece.stop - piece.start]
        if shard.grad is None:
            shard.grad = self._grads[shard].copy_(arrived)
        else:
            shard.grad += arrived

    def start_showing(self) -> None:
        """Start sending this rank's updated runs to the others along `data`."""
        for piece in self._mine:
            shown = self._shown.values[piece.offset : piece.offset + piece.stop - piece.start]
            shown.copy_(self._runs[piece.slot][piece.start : piece.stop])
        self._flight = start_gather(self._gathered, self._shown, self.mesh, (AXIS,))

    def finish_showing(self) -> None:
        """Copy the runs that the others updated into the parameters."""
        self._flight.wait()
        for piece in self._pieces:
            if piece.part != self._here:
                begin = piece.part * self._width + piece.offset
                arrived = _part(self._gathered.values, begin, begin + piece.stop - piece.start)
                _part(self._runs[piece.slot], piece.start, piece.stop).copy_(arrived)

    def whole_gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """The summed gradients of the parameters that have one, gathered on every rank along `data`."""
        self._shown.values.zero_()
        for piece in self._mine:
            grad = self.shards[piece.slot.parameter].grad
            if grad is not None:
                self._shown.values[piece.offset : piece.offset + piece.stop - piece.start].copy_(grad)
                self._shown.values[self._part_size + self.slots.index(piece.slot)] = 1
        start_gather(self._gathered, self._shown, self.mesh, (AXIS,)).wait()
        parts = self._gathered.values.view(self._parts, self._width)
        counts = parts[:, self._part_size :].sum(dim=0).tolist()
        present = [slot for slot, count in zip(self.slots, counts, strict=True) if count]
        return {slot.parameter: self._gathered_gradient(slot) for slot in present}

    def _gathered_gradient(self, slot: Slot) -> torch.Tensor:
        run = torch.empty_like(self._runs[slot])
        for piece in (piece for piece in self._pieces if piece.slot is slot):
            begin = piece.part * self._width + piece.offset
            run[piece.start : piece.stop] = self._gathered.values[begin : begin + piece.stop - piece.start]
        return as_gradient_of(slot.parameter, shaped_like(run, local_of(slot.parameter)))


class ShardedReducer(GradientReducer):
    """Leaves each rank along `data` with its part of the summed gradients; `ShardedOptimizer` updates that part.

    After backward `p.grad` of these parameters is None: the gradients belong to the shards.
    """

    def __init__(self, mesh: OpenMesh, axes_of: AxesOf, **options: Any) -> None:
        super().__init__(mesh, axes_of, **options)
        self.shards = {p: shard for bucket in self.scattered for p, shard in bucket.shards.items()}
        """This rank's run of each scattered parameter of which it has one."""
        self.scattered_parameters = {slot.parameter for bucket in self.scattered for slot in bucket.slots}
        self._axes_of_shards = {shard: (AXIS, *distinct_axes(p)) for p, shard in self.shards.items()}
        own(self._axes_of_shards, self)
        self._hooks.add(register_optimizer_step_pre_hook(_refuse_scattered))

    def held(self, parameter: torch.Tensor) -> Held:
        """For a scattered parameter, this rank's run, if it has one."""
        if parameter in self.scattered_parameters:
            shard = self.shards.get(parameter)
            return [] if shard is None else [(shard, self._axes_of_shards[shard])]
        if parameter in self._axes_of_shards:
            return [(parameter, self._axes_of_shards[parameter])]  # type: ignore[index]
        return super().held(parameter)

    @property
    def apart(self) -> Iterable[torch.Tensor]:
        return self.shards.values()

    def gather_gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        gathered = [bucket.whole_gradients() for bucket in self.scattered]
        return {parameter: gradient for bucket in gathered for parameter, gradient in bucket.items()}

    def span_of(self, shard: torch.Tensor) -> Span:
        """This rank's run of a parameter, as a span of its shard's values in memory order."""
        return next(bucket.spans[shard] for bucket in self.scattered if shard in bucket.spans)  # type: ignore[index]

    @property
    def scattered(self) -> list[ScatteredBucket]:
        return [bucket for bucket in self.buckets if isinstance(bucket, ScatteredBucket)]

    def _bucket(self, slots: list[Slot], axes: Axes, dtype: torch.dtype) -> Bucket:
        if AXIS in axes and self.mesh.mesh.extent((AXIS,)) > 1:
            return ScatteredBucket(slots, self.mesh, axes, dtype)
        return super()._bucket(slots, axes, dtype)


def _refuse_scattered(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse ordinary optimisers: they would find no gradients on scattered parameters, and silently do nothing."""
    del args, kwargs
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        owner = owner_of(parameter)
        if isinstance(owner, ShardedReducer) and parameter in owner.scattered_parameters:
            raise UnsupportedError(
                f'{type(optimizer).__name__} was given whole parameters, but the plan\'s reduction="sharded" leaves '
                f"each rank a part of their gradients; make it with `net.optimizer({type(optimizer).__name__}, ...)`."
            )


def _part(run: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """A part of a run of memory. Dry runs take one of every weight for every rank, so they do not record it."""
    if not run.is_meta:
        return run[start:stop]
    return unseen_view(run, (stop - start,), (1,), int(run.storage_offset()) + start)


def _run(parameter: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
    """A parameter's values, without a copy, or `values` in the same order, as one run of memory."""
    local = local_of(parameter)
    tensor = local if values is None else values
    if values is not None and values.stride() != local.stride():
        tensor = torch.empty_like(local, dtype=values.dtype).copy_(values)
    if not is_dense(tensor):
        raise UnsupportedError(
            f"a parameter of shape {tuple(local.shape)} and strides {local.stride()} has gaps in memory and cannot be "
            "sharded; make it contiguous first."
        )
    return tensor.as_strided((tensor.numel(),), (1,))
