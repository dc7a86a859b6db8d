"""Summing weight gradients over ranks while backward runs.

Backward on each rank computes a part of a weight's gradient. The gradient of the global loss is the sum of the parts,
never their mean, because losses already divide by the global count. Parts are collected in buckets that leave as soon
as they are full, and the end of `backward()` waits for them: after it, gradients equal a single device's.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from convmesh.dist import OpenMesh
from convmesh.dist.agreement import agree
from convmesh.dist.flat_buffers import root_of
from convmesh.errors import ConvMeshError, LayoutError
from convmesh.gradients.buckets import Axes, Bucket, Slot, SummedBucket, plan_buckets
from convmesh.gradients.local_gradients import local_of
from convmesh.gradients.mixed_groups import loop_over_mixed_groups
from convmesh.gradients.owned_hooks import OwnedHooks, weak_hook
from convmesh.gradients.owners import Held, distinct_axes, own, owner_of
from convmesh.private_torch.backward_engine import (
    at_end_of_backward,
    backward_number,
    hooks_on_gradient,
    running_node,
    will_run,
)
from convmesh.private_torch.dtensors import is_dtensor

AxesOf = Sequence[tuple[nn.Parameter, Axes]]

BYTES_BUCKET = 25 << 20
BYTES_FIRST = 1 << 20
"""The first bucket is small, so that the transfers start early."""


class GradientReducer:
    """Sums gradients over the axes along which they are partial, in buckets, while backward runs.

    `axes_of` names every parameter in the order in which forward uses them, with the axes along which its gradient is
    partial; () for those that need no sum. Gradients accumulate over backward passes as on one device. `dtype_reduce`
    is the type in which real gradients travel and are added, e.g. float32 for bfloat16 weights; by default their own.
    A reducer that does not watch backward sums when told to (`reduce_now`).

    Whoever makes a reducer must keep it: the parameters do not, and its hooks go when it is freed.
    """

    remembers: bool = False
    """Whether a sum depends on the gradients of earlier steps."""

    def __init__(
        self,
        mesh: OpenMesh,
        axes_of: AxesOf,
        bytes_bucket: int = BYTES_BUCKET,
        bytes_first: int = BYTES_FIRST,
        dtype_reduce: torch.dtype | None = None,
        watches: bool = True,
    ) -> None:
        _check_sizes(bytes_bucket=bytes_bucket, bytes_first=bytes_first)
        self.mesh = mesh
        self.dtype_reduce = dtype_reduce
        self.axes_of = _without_repeats(axes_of)
        self.buckets = self._make_buckets(bytes_bucket, bytes_first)
        _refuse_second(self._slots)
        self._agree()
        self._defers = False
        self._passes = False
        self._next = 0
        self._tasks: set[int] = set()
        self._hooks = OwnedHooks(self)
        if any(is_dtensor(p) for p in self.axes_of):
            self._hooks.add(register_optimizer_step_pre_hook(loop_over_mixed_groups))
        self._watched: dict[int, tuple[Bucket, Slot, Any]] = {}
        """By the parameter's id: where its gradient goes, and the node with which autograd adds to it."""
        self._stream: Any = None
        self._watches = OwnedHooks(self)
        if watches:
            self.watch()
        own(self.axes_of, self)

    def _make_buckets(self, bytes_bucket: int, bytes_first: int) -> list[Bucket]:
        mesh = self.mesh
        shared = [(p, axes) for p, axes in self.axes_of.items() if p.requires_grad and mesh.mesh.extent(axes) > 1]
        keys = [(axes, p.dtype, self._travels_as(p.dtype)) for p, axes in shared]
        slots = [Slot(p, speaks=root_of(mesh, axes) == mesh.rank) for p, axes in shared]
        bytes_ = [local_of(p).numel() * key[2].itemsize for (p, _), key in zip(shared, keys, strict=True)]
        planned = plan_buckets(keys, bytes_, bytes_bucket, bytes_first)
        return [self._bucket([slots[i] for i in plan], keys[plan[0]][0], keys[plan[0]][2]) for plan in planned]

    def _travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which gradients are summed for weights of this type."""
        return dtype if self.dtype_reduce is None or dtype.is_complex else self.dtype_reduce

    def _bucket(self, slots: list[Slot], axes: Axes, dtype: torch.dtype) -> Bucket:
        return SummedBucket(slots, self.mesh, axes, dtype)

    def _agree(self) -> None:
        """Ranks that sum together must have the same buckets; others, such as other stages, may have their own."""
        if self.mesh.is_dry:
            return
        for axes in dict.fromkeys(bucket.axes for bucket in self.buckets):
            plan = [[tuple(local_of(s.parameter).shape) for s in b.slots] for b in self.buckets if b.axes == axes]
            ranks = [self.mesh.world_rank(r) for r in self.mesh.mesh.group(axes, self.mesh.rank)]
            agree(self.mesh.background(axes), ranks, f"gradients summed over {axes}", str(plan))

    def gather_gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Gradients that are not on their parameters, gathered from the ranks that share them; all ranks call it."""
        return {}

    def watch(self) -> None:
        """Watch gradients on the current CUDA stream. Call it again before backward runs on another stream.

        Autograd adds a gradient on the stream that was current when it made the adding node, and the reducer keeps
        these nodes. Backward on another stream would wait for that one, which is forbidden while it is captured.
        """
        self._watches.close()
        self._watches = OwnedHooks(self)
        self._watched.clear()  # nothing else holds the nodes: autograd makes new ones
        self._stream = _current_stream(self.mesh.device)
        for bucket in self.buckets:
            for slot in bucket.slots:
                self._watched[id(slot.parameter)] = bucket, slot, self._watch(bucket, slot)

    def _watch(self, bucket: Bucket, slot: Slot) -> Any:
        """Hook the point where autograd adds a gradient. Keep the returned node: its hook goes when it does."""
        accumulator = torch.autograd.graph.get_gradient_edge(slot.parameter).node
        self._watches.add(
            accumulator.register_prehook(weak_hook(self._before, bucket, slot)),
            slot.parameter.register_post_accumulate_grad_hook(weak_hook(self._after, bucket, slot)),
        )
        return accumulator

    def deliver(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> list[bool]:
        """Take what a node of backward computed for several parameters; return which gradients were taken.

        The node passes None on in their place, and autograd calls the hooks once every path to a parameter has run.
        Gradients that others watch, or that are added to one, are left to autograd.
        """
        if self._passes or self._defers or _current_stream(self.mesh.device) != self._stream:
            return [False] * len(parameters)
        return [self._delivered(p, gradient) for p, gradient in zip(parameters, gradients, strict=True)]

    def _delivered(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        bucket, slot, accumulator = self._watched.get(id(parameter), (None, None, None))
        if bucket is None or slot is None or bucket.is_started or slot.has_gradient:
            return False
        if hooks_on_gradient(parameter) > 1 or not will_run(accumulator):
            return False
        slot.delivered, slot.is_partial = gradient, False
        return True

    def _before(self, bucket: Bucket, slot: Slot, grads: tuple[torch.Tensor | None, ...]) -> None:
        if self._passes or grads[0] is None:
            return
        if bucket.is_started:
            raise ConvMeshError(
                f"a parameter of shape {tuple(slot.parameter.shape)} got a second gradient after its sum had begun: it "
                "is used in two blocks under checkpoint(use_reentrant=True), or an earlier backward failed. Use "
                "use_reentrant=False, or call `reset()` on the reducer after a failure."
            )
        if slot.delivered is not None:
            slot.return_delivered()
        elif slot.parameter.grad is None:
            slot.is_partial = False
        elif not slot.is_ready:
            slot.open_sum()

    def _after(self, bucket: Bucket, slot: Slot, parameter: torch.Tensor) -> None:
        del parameter
        if self._passes or not slot.has_gradient:  # autograd also calls hooks without a gradient
            return
        if self._defers:
            slot.is_partial = True
            return
        bucket.take(slot)
        slot.is_ready = True
        self._finish_after_backward()
        if self._next < len(self.buckets) and _is_full(self.buckets[self._next]):
            self._start_full()

    @torch.no_grad()
    def _start_full(self) -> None:
        """Start full buckets in order: in different orders, ranks would sum different buckets."""
        while self._next < len(self.buckets) and _is_full(self.buckets[self._next]):
            self.buckets[self._next].start()
            self._next += 1

    def _finish_after_backward(self) -> None:
        task = backward_number()
        if task not in self._tasks:
            self._tasks.add(task)
            at_end_of_backward(self._at_end)

    def _at_end(self) -> None:
        """Called when a backward ends. One inside another (a reentrant checkpoint) leaves the sums to the outer one."""
        outer = running_node()
        if outer is None:
            self.reduce_now()
            return
        for node, _ in outer.next_functions:
            if node is not None:
                self._hook_once(node)

    def _hook_once(self, node: Any) -> None:
        def finish_outer(grads: tuple[torch.Tensor, ...]) -> None:
            del grads
            handle.remove()
            self._finish_after_backward()

        handle = node.register_prehook(finish_outer)

    @torch.no_grad()
    def reduce_now(self) -> None:
        """Sum all gradients that are still partial. Backward ends with this; call it after a schedule in `no_sync`."""
        for bucket in self.buckets[self._next :]:
            bucket.start()
        for bucket in self.buckets:
            bucket.relay()
        for bucket in self.buckets:
            bucket.finish()
        self._next = 0
        self._tasks.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients as this rank's parts, without traffic; the next backward outside sums everything once."""
        before, defers = [slot.parameter.grad for slot in self._slots], self._defers
        self._defers = True
        try:
            yield
        finally:
            self._defers = defers
            # Schedules that compute weight gradients outside backward write them without calling hooks.
            for slot, grad in zip(self._slots, before, strict=True):
                slot.is_partial |= slot.parameter.grad is not None and slot.parameter.grad is not grad

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Ignore gradients computed inside: a schedule keeps them until `backward()` delivers them."""
        self._passes = True
        try:
            yield
        finally:
            self._passes = False

    @property
    def _slots(self) -> list[Slot]:
        return [slot for bucket in self.buckets for slot in bucket.slots]

    def held(self, parameter: torch.Tensor) -> Held:
        """What this rank holds of a parameter's gradient after backward, with the axes along which ranks differ."""
        return [(parameter, distinct_axes(parameter))]

    @property
    def apart(self) -> Iterable[torch.Tensor]:
        """Tensors other than parameters that have gradients after backward."""
        return ()

    def sums(self, parameter: torch.Tensor) -> bool:
        """Whether this reducer's hooks are on a parameter."""
        return self._hooks.are_open and any(slot.parameter is parameter for slot in self._slots)

    def wait(self) -> None:
        """Return when parameters are up to date, as they always are here."""

    def reset(self) -> None:
        """Abandon a backward pass that failed on every rank, and clear all gradients."""
        for bucket in self.buckets[: self._next]:
            bucket.relay()
            bucket.finish()
        for slot in self._slots:
            slot.parameter.grad = slot.delivered = None
            slot.is_ready = slot.is_partial = False
        self._next = 0
        self._tasks.clear()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self._hooks.close()
        self._watches.close()


def _refuse_second(slots: Sequence[Slot]) -> None:
    """Refuse parameters whose gradients another reducer sums: together they would sum them twice."""
    if _summed_elsewhere(slots):
        gc.collect()  # a dropped network may be a cycle that is not collected yet
    if slot := _summed_elsewhere(slots):
        raise LayoutError(
            f"the gradients of a parameter of shape {tuple(slot.parameter.shape)} are summed already, for an earlier "
            "network of the same model; drop that network first (`del net`), or make this one from a copy of the model."
        )


def _summed_elsewhere(slots: Sequence[Slot]) -> Slot | None:
    return next((slot for slot in slots if _is_summed(slot.parameter)), None)


def _is_summed(parameter: torch.Tensor) -> bool:
    owner = owner_of(parameter)
    return isinstance(owner, GradientReducer) and owner.sums(parameter)


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _is_full(bucket: Bucket) -> bool:
    """Checked from the last slot on, which usually fills last, so that a `no` comes at once."""
    return all(slot.is_ready for slot in reversed(bucket.slots))


def _without_repeats(axes_of: AxesOf) -> dict[nn.Parameter, Axes]:
    """Parameters in the order of first use: one that two layers share is complete after the first one's backward."""
    unique: dict[nn.Parameter, Axes] = {}
    for parameter, axes in axes_of:
        if unique.setdefault(parameter, axes) != axes:
            raise LayoutError(
                f"`axes_of` names a parameter of shape {tuple(parameter.shape)} twice, with {unique[parameter]} and "
                f"{axes}; a gradient is partial along one set of axes: use the same split for layers that share it."
            )
    return unique


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LayoutError(f"`{name}` (={value!r}) must be a positive number of bytes, such as {25 << 20} (25 MiB).")
