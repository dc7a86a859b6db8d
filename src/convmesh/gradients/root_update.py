"""The root scheme, for comparison: one rank sums the gradients, updates the weights and broadcasts them.

Weights leave in chunks in the order of layers, so that the next forward starts before later layers' weights arrive.
One link carries all that a ring would spread over its links, which is why the other schemes exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from convmesh.dist import OpenMesh
from convmesh.dist.flat_buffers import FlatBuffer, Flight, root_of, start_broadcast
from convmesh.errors import LayoutError, UnsupportedError
from convmesh.gradients.buckets import Axes, Bucket, RootBucket, Slot
from convmesh.gradients.local_gradients import local_of, shaped_like
from convmesh.gradients.owned_hooks import weak_hook
from convmesh.gradients.reduction import AxesOf, GradientReducer


class Chunk:
    """Weights of one type and one set of axes that travel together from the rank that updated them."""

    def __init__(self, parameters: Sequence[nn.Parameter], mesh: OpenMesh, axes: Axes) -> None:
        self.parameters, self._mesh, self._axes = list(parameters), mesh, axes
        self._is_root = root_of(mesh, axes) == mesh.rank
        locals_ = [local_of(p) for p in parameters]
        self._buffer = FlatBuffer(sum(t.numel() for t in locals_), locals_[0].dtype, mesh)
        runs = self._buffer.values.split([t.numel() for t in locals_])
        self._places = [shaped_like(run, t) for run, t in zip(runs, locals_, strict=True)]
        self._flight: Flight | None = None

    @property
    def is_under_way(self) -> bool:
        return self._flight is not None

    @torch.no_grad()
    def start(self) -> None:
        if self._is_root:
            for place, parameter in zip(self._places, self.parameters, strict=True):
                place.copy_(local_of(parameter))
        self._flight = start_broadcast(self._buffer, self._mesh, self._axes)

    @torch.no_grad()
    def wait(self) -> None:
        if self._flight is None:
            return
        self._flight.wait()
        self._flight = None
        if not self._is_root:
            for place, parameter in zip(self._places, self.parameters, strict=True):
                local_of(parameter).copy_(place)


class BroadcastReducer(GradientReducer):
    """Sums gradients on the first rank along their axes; after its optimiser's step, weights follow in `chunks` chunks.

    Any torch optimiser over `net`'s parameters works: on the other ranks it finds no gradients and does nothing. Its
    step starts the chunks, and each layer waits for its own before it runs. With gradient scaling use ConvMesh's
    `GradScaler`, which includes ranks without gradients. Call `wait()` before weights are read outside forward
    (`net.state_dict()` does so itself), and before each forward if no `net` is given.
    """

    def __init__(
        self, mesh: OpenMesh, axes_of: AxesOf, net: nn.Module | None = None, chunks: int = 8, **options: Any
    ) -> None:
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise LayoutError(f"`chunks` (={chunks!r}) must be a positive number of chunks, e.g. 8.")
        super().__init__(mesh, axes_of, **options)
        sent = {slot.parameter for bucket in self.buckets for slot in bucket.slots}
        order = [p for p in self.axes_of if p in sent]
        self.chunks = [chunk for group in _cut(order, chunks) for chunk in self._chunks_of(group)]
        self._chunk_of = {p: chunk for chunk in self.chunks for p in chunk.parameters}
        if net is not None:
            self._watch_forward(net)
        self._hooks.add(register_optimizer_step_post_hook(weak_hook(self._after_step)))

    def _bucket(self, slots: list[Slot], axes: Axes, dtype: torch.dtype) -> Bucket:
        return RootBucket(slots, self.mesh, axes, dtype)

    def _chunks_of(self, parameters: list[nn.Parameter]) -> list[Chunk]:
        kinds: dict[tuple[Axes, torch.dtype], list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault((self.axes_of[parameter], parameter.dtype), []).append(parameter)
        return [Chunk(group, self.mesh, axes) for (axes, _), group in kinds.items()]

    def _watch_forward(self, net: nn.Module) -> None:
        for module in net.modules():
            if any(p in self._chunk_of for p in module.parameters(recurse=False)):
                self._hooks.add(module.register_forward_pre_hook(weak_hook(self._before_forward)))
        self._hooks.add(net.register_state_dict_pre_hook(weak_hook(self._before_reading)))

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        del args
        for parameter in module.parameters(recurse=False):
            if parameter in self._chunk_of:
                self._chunk_of[parameter].wait()

    def _before(self, bucket: Bucket, slot: Slot, grads: tuple[torch.Tensor | None, ...]) -> None:
        if self._chunk_of[slot.parameter].is_under_way:  # type: ignore[index]
            raise UnsupportedError(
                f"a parameter of shape {tuple(slot.parameter.shape)} was used outside the forward of the module that "
                "owns it, before its update had arrived; call `wait()` on the reducer first, or use "
                'reduction="bucketed".'
            )
        super()._before(bucket, slot, grads)

    def send(self, parameters: set[nn.Parameter]) -> None:
        """Start the chunks that hold any of `parameters`, in the order of layers."""
        self.wait()
        for chunk in self.chunks:
            if not parameters.isdisjoint(chunk.parameters):
                chunk.start()

    def _before_reading(self, *_: Any) -> None:
        self.wait()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Torch calls this after the step of every optimiser; one over other parameters sends nothing."""
        del args, kwargs
        self.send({p for group in optimizer.param_groups for p in group["params"]})

    def wait(self) -> None:
        """Return when all weights are up to date."""
        for chunk in self.chunks:
            chunk.wait()


def _cut(parameters: list[nn.Parameter], chunks: int) -> list[list[nn.Parameter]]:
    """Parameters in order, in at most `chunks` groups of about the same number of bytes."""
    sizes = [local_of(p).nbytes for p in parameters]
    total, done = sum(sizes), 0
    groups: list[list[nn.Parameter]] = [[] for _ in range(chunks)]
    for parameter, size in zip(parameters, sizes, strict=True):
        groups[min(chunks - 1, (2 * done + size) * chunks // max(1, 2 * total))].append(parameter)
        done += size
    return [group for group in groups if group]
