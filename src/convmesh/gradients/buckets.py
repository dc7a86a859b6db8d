"""Buckets: gradients of several parameters in one buffer, which travel together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from convmesh.dist import OpenMesh
from convmesh.dist.flat_buffers import FlatBuffer, Flight, root_of, start_sum, start_sum_at_root
from convmesh.gradients.local_gradients import as_gradient_of, local_gradient, local_of, shaped_like
from convmesh.private_torch.tensor_internals import copy_all_

Axes = tuple[str, ...]


def plan_buckets(
    keys: Sequence[Hashable], bytes_: Sequence[int], bytes_bucket: int, bytes_first: int
) -> list[list[int]]:
    """Indices of parameters by bucket; buckets in the order in which backward fills them, from the last parameter on.

    Only parameters with the same key share a bucket. The first bucket of a key is smaller, so that it leaves early.
    """
    filling: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    planned: list[list[int]] = []
    limits: dict[Hashable, int] = {}
    for index in reversed(range(len(keys))):
        key = keys[index]
        filling.setdefault(key, []).append(index)
        filled[key] = filled.get(key, 0) + bytes_[index]
        if filled[key] >= limits.get(key, bytes_first):
            planned.append(filling.pop(key))
            limits[key], filled[key] = bytes_bucket, 0
    return planned + sorted(filling.values(), key=lambda bucket: -bucket[-1])


class Slot:
    """A parameter whose gradient is summed, and the state of that gradient."""

    def __init__(self, parameter: torch.Tensor, speaks: bool) -> None:
        self.parameter = parameter
        self.speaks = speaks
        """Whether this rank is the one that adds an already summed gradient to the next sum."""
        self.is_partial = False
        """Whether the gradient is this rank's part, still to be summed."""
        self.is_ready = False
        """Whether the running backward pass has computed the gradient."""
        self.delivered: torch.Tensor | None = None
        """The gradient of this rank's shard, in any type, if it was given to the reducer and not to the parameter."""

    @property
    def has_gradient(self) -> bool:
        return self.delivered is not None or self.parameter.grad is not None

    def gradient(self) -> torch.Tensor:
        """The gradient of this rank's shard; there must be one."""
        return local_gradient(self.parameter) if self.delivered is None else self.delivered

    def return_delivered(self) -> None:
        """Let autograd add to a delivered gradient, as another path leads to the parameter too."""
        assert self.delivered is not None
        self.parameter.grad = as_gradient_of(self.parameter, self.delivered.to(self.parameter.dtype, copy=True))
        self.delivered = None

    def open_sum(self) -> None:
        """Turn an already summed gradient into parts: one rank keeps it, the others start from zero.

        The next sum then counts it once, even if it was changed in between.
        """
        if not self.is_partial and not self.speaks:
            self.parameter.grad = None


class Bucket(Protocol):
    """A bucket as its reducer sees it."""

    axes: Axes
    slots: list[Slot]
    is_started: bool

    @property
    def elements(self) -> int:
        """The number of values that travel."""

    def take(self, slot: Slot) -> None:
        """Copy a parameter's gradient into the buffer."""

    def start(self) -> None:
        """Start the sum; parameters without a gradient count as zeros."""

    def relay(self) -> None:
        """Start the second transfer, if the sum needs one."""

    def finish(self) -> None:
        """Wait, and leave the sums where the optimiser reads them."""


class SummedBucket:
    """An all-reduce in place. Gradients are views of the buffer, unless they are summed in another type.

    The buffer ends with one count per parameter: the number of ranks that have its gradient. So ranks that did not use
    a parameter learn whether others did, and it gets a gradient on all ranks or on none.
    """

    def __init__(self, slots: list[Slot], mesh: OpenMesh, axes: Axes, dtype: torch.dtype) -> None:
        self.slots, self.axes, self.mesh = slots, axes, mesh
        self.is_started = False
        locals_ = [local_of(slot.parameter) for slot in slots]
        runs = self._lay_out(locals_, dtype)
        self._places = {s: shaped_like(run, local) for s, run, local in zip(slots, runs, locals_, strict=True)}
        self._views = {
            slot: as_gradient_of(slot.parameter, place)
            for slot, place in self._places.items()
            if place.dtype == slot.parameter.dtype
        }
        self._waiting: dict[Slot, None] = {}
        """Slots whose gradients are not copied yet. GPUs copy all at once: a launch takes longer than most copies."""
        self._copies_at_once = mesh.device.type == "cuda"
        self._present: list[bool] = []
        self._flight = Flight()

    def _lay_out(self, locals_: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """Make the buffer; return where each parameter's values go."""
        sizes = [*(local.numel() for local in locals_), len(locals_)]
        self.buffer = FlatBuffer(self._room(sum(sizes)), dtype, self.mesh)
        *runs, self._counts = self.buffer.values[: sum(sizes)].split(sizes)
        return list(runs)

    def _room(self, values: int) -> int:
        """The length of a buffer for this number of values."""
        return values

    @property
    def elements(self) -> int:
        return self.buffer.values.numel()

    def take(self, slot: Slot) -> None:
        view = self._views.get(slot)
        if view is None or slot.parameter.grad is not view:
            self._waiting[slot] = None
        if not self._copies_at_once:
            self._copy_waiting()

    @torch.no_grad()
    def _copy_waiting(self) -> None:
        slots = [slot for slot in self._waiting if slot.has_gradient]  # others were reset
        self._waiting.clear()
        copy_all_([self._places[slot] for slot in slots], [slot.gradient() for slot in slots])
        for slot in slots:
            slot.delivered = None
            if slot in self._views:
                slot.parameter.grad = self._views[slot]

    def start(self) -> None:
        self._present = [self._complete(slot) for slot in self.slots]
        self._copy_waiting()
        if all(self._present):
            self._counts.fill_(1)
        else:
            self._counts.copy_(torch.tensor(self._present))
        self.is_started = True
        self._flight = self._post()

    def _complete(self, slot: Slot) -> bool:
        """Fill in a gradient that backward did not compute: parts of earlier passes, an earlier sum, or zeros."""
        if slot.is_ready:
            return True
        is_present = slot.parameter.grad is not None
        slot.open_sum()
        if slot.parameter.grad is None:
            self._places[slot].zero_()
        else:
            self.take(slot)
        return is_present

    def _post(self) -> Flight:
        return start_sum(self.buffer, self.mesh, self.axes)

    def relay(self) -> None:
        """An all-reduce is one transfer."""

    def finish(self) -> None:
        self._flight.wait()
        for slot, is_present in zip(self.slots, self._present_anywhere(), strict=True):
            self._publish(slot, is_present)
            slot.is_ready = slot.is_partial = False
        self.is_started = False

    def _present_anywhere(self) -> list[bool]:
        if all(self._present) or self.mesh.is_dry:
            return self._present
        return [count > 0 for count in self._counts.tolist()]

    def _publish(self, slot: Slot, is_present: bool) -> None:
        parameter, place = slot.parameter, self._places[slot]
        if not is_present:
            return
        if slot in self._views:
            if parameter.grad is None:
                parameter.grad = self._views[slot]
        elif parameter.grad is not None:
            local_of(parameter.grad).copy_(place)
        else:
            parameter.grad = as_gradient_of(parameter, place.to(parameter.dtype, copy=True))


class RootBucket(SummedBucket):
    """The sum on the first rank only. The others keep no gradients, so their optimisers do nothing."""

    def _post(self) -> Flight:
        return start_sum_at_root(self.buffer, self.mesh, self.axes)

    def _present_anywhere(self) -> list[bool]:
        return super()._present_anywhere() if self.mesh.rank == root_of(self.mesh, self.axes) else self._present

    def _publish(self, slot: Slot, is_present: bool) -> None:
        if slot.speaks:
            super()._publish(slot, is_present)
        else:
            slot.parameter.grad = None
