"""Running one call of the network dry: on one rank of a mesh, forward and backward, on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from convmesh.dist import OpenMesh
from convmesh.kernels.memory_format import Order, order_of, strides_of
from convmesh.layout import Layout
from convmesh.layout.channels import ChannelSplit
from convmesh.lowering.live_bytes import HeldStorages, bytes_of, owned, owned_by
from convmesh.lowering.recorder import SavedTensors, recorded
from convmesh.ops.channels.undecided_weight import PlannedWeight
from convmesh.ops.core.sharded import Sharded
from convmesh.plans import Held, Saved, Step
from convmesh.private_torch import tree_flatten, tree_unflatten

Axes = tuple[str, ...]
Gradients = list[torch.Tensor | None]
Strides = tuple[int, ...]
"""How a gradient lies in memory."""


@dataclass(frozen=True, slots=True)
class Dry:
    """A tensor of a dry run: where it lives, its type, and whether a gradient comes back for it."""

    layout: Layout
    dtype: torch.dtype
    learns: bool
    order: Order = ()
    """Its dims from the one that lies outermost in memory to the innermost; empty: as they are numbered."""

    def on(self, mesh: OpenMesh) -> Sharded:
        """This rank's shard, without data."""
        shape = self.layout.box(mesh.rank).shape
        local = torch.empty_permuted(shape, self.order or tuple(range(len(shape))), dtype=self.dtype, device="meta")
        return Sharded(local.requires_grad_(self.learns), self.layout, mesh)

    def gradient(self, mesh: OpenMesh, strides: Strides | None) -> torch.Tensor:
        """A gradient of the shard, without data: lying as told, or else as the shard itself."""
        local = self.on(mesh).local.detach()
        return _lying(local, strides)


@dataclass(frozen=True)
class DryResult:
    """What a call gives (`Dry` in place of tensors), does and keeps, and the axes that cut its weights' work."""

    value: Any
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    saved: tuple[Saved, ...]
    sum_axes: tuple[Axes, ...]
    decided: ChannelSplit | None = None
    """The cut of the weight, if it was left to the call."""
    held: Held = field(default_factory=Held)
    weight_steps: int = 0
    """How many of the last steps of backward find gradients of weights apart."""
    gradients: tuple[Strides | None, ...] = ()
    """Of each tensor that it was given: how the gradient that is found lies in memory."""


class DryRunner:
    """Runs calls on one rank of a mesh; a call like an earlier one is not run again."""

    def __init__(self, mesh: OpenMesh) -> None:
        self.mesh = mesh
        self.splits_backward = False
        """Whether gradients of weights are found apart from those of inputs, as some schedules of pipelines do."""
        self._known: dict[Any, DryResult] = {}

    def run(
        self,
        key: Any,
        call: Callable[..., Any],
        args: Any,
        weights: Iterable[torch.Tensor] = (),
        arriving: tuple[Strides | None, ...] = (),
    ) -> DryResult:
        """`call(*args, **kwargs)` for `args` = (args, kwargs) with `Dry` in place of tensors.

        `key` tells calls apart that differ in more than their arguments; None keeps the result from being reused.
        `arriving` says how gradients of the outputs lie in memory, if not as the outputs do.
        """
        leaves, spec = tree_flatten(args)
        kind = (key, str(spec), self.splits_backward, arriving)
        known = None if key is None else (*kind, *(x if isinstance(x, Dry) else repr(x) for x in leaves))
        if known is None:
            return self._run(call, leaves, spec, list(weights), arriving)
        if known not in self._known:
            self._known[known] = self._run(call, leaves, spec, list(weights), arriving)
        return self._known[known]

    def _run(
        self,
        call: Callable[..., Any],
        leaves: Sequence[Any],
        spec: Any,
        weights: list[torch.Tensor],
        arriving: tuple[Strides | None, ...],
    ) -> DryResult:
        axes: list[Axes] = []
        mesh = replace(self.mesh, left_partial=axes)
        inputs = [leaf.on(mesh) for leaf in leaves if isinstance(leaf, Dry)]
        sources = [x.local for x in inputs]
        for x in inputs:  # a leaf of autograd must not be overwritten, as an in-place operator would
            x.local = x.local.clone() if x.local.requires_grad else x.local
        given = iter(inputs)
        args, kwargs = tree_unflatten([next(given) if isinstance(leaf, Dry) else leaf for leaf in leaves], spec)
        originals, kept, storages = [x.local for x in inputs], SavedTensors(), HeldStorages("meta")
        before = storages.start((*originals, *weights))
        with recorded(self.mesh) as forward, kept.hooks, storages:
            value = call(*args, **kwargs)
        outputs = [x.local for x in tree_flatten(value)[0] if isinstance(x, Sharded)]
        shards = _unlisted(_other_leaves(outputs, sources), weights)
        bytes_forward = storages.bytes_peak - before - bytes_of(shards)
        saved = kept.listed(originals, outputs, [*weights, *shards])
        orders = arriving or (None,) * len(outputs)
        ends = [_lying(t, order) if t.requires_grad else None for t, order in zip(outputs, orders, strict=True)]
        back = self._backward(outputs, ends, sources, [*weights, *shards], storages)
        held = Held(
            bytes_forward,
            back.bytes_peak,
            back.bytes_weights,
            outputs=owned(outputs, (("weight", weights), ("input", originals), ("output", outputs))),
            gradients=owned_by(back.gradients, (("output", ends), ("input", back.gradients))),
        )
        decided = next((w.decided for w in weights if isinstance(w, PlannedWeight) and w.decided), None)
        return DryResult(
            value=_dry(value),
            forward=tuple(forward),
            backward=tuple(back.steps),
            saved=saved,
            sum_axes=tuple(axes),
            decided=decided,
            held=held,
            weight_steps=back.weight_steps,
            gradients=tuple(None if gradient is None else gradient.stride() for gradient in back.gradients),
        )

    def _backward(
        self,
        outputs: Sequence[torch.Tensor],
        ends: Gradients,
        sources: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        storages: HeldStorages,
    ) -> Backward:
        wanted, learning = [t for t in sources if t.requires_grad], [w for w in weights if w.requires_grad]
        if self.splits_backward and wanted and learning and any(t.requires_grad for t in outputs):
            back = _split_backward(self.mesh, outputs, ends, wanted, storages)
        else:
            before = storages.start(ends)
            with recorded(self.mesh) as steps, storages:
                found = _gradients(outputs, ends, wanted, learning)
            back = Backward(steps, found, storages.bytes_peak - before)
        each = iter(back.gradients)
        return replace(back, gradients=[next(each) if t.requires_grad else None for t in sources])


@dataclass(frozen=True)
class Backward:
    """What a call's backward does and finds."""

    steps: list[Step]
    gradients: Gradients
    """Of the tensors that the call was given."""
    bytes_peak: int
    weight_steps: int = 0
    """How many of the last steps are for weights alone."""
    bytes_weights: int = 0
    """The most that those hold."""


def _gradients(
    outputs: Sequence[torch.Tensor], ends: Gradients, sources: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> Gradients:
    """The gradients of `sources`, from those of the outputs; they are found together with those of the weights."""
    learning = [t for t in outputs if t.requires_grad]
    if not learning or not (sources or weights):
        return [None] * len(sources)
    given = [end for end in ends if end is not None]
    found: Gradients = list(torch.autograd.grad(learning, [*sources, *weights], given, allow_unused=True))
    for weight, gradient in zip(weights, found[len(sources) :], strict=True):
        # `.grad` lies in memory as its weight does.
        if gradient is not None and strides_of(gradient) != strides_of(weight):
            torch.empty_like(weight).copy_(gradient)
    return found[: len(sources)]


def _lying(tensor: torch.Tensor, strides: Strides | None) -> torch.Tensor:
    """A tensor like another, in this order in memory."""
    if strides is None:
        return torch.empty_like(tensor)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)


def _unlisted(tensors: Sequence[torch.Tensor], listed: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    known = {id(t) for t in listed}
    return [t for t in tensors if id(t) not in known]


def _split_backward(
    mesh: OpenMesh,
    outputs: Sequence[torch.Tensor],
    given: Gradients,
    sources: list[torch.Tensor],
    storages: HeldStorages,
) -> Backward:
    """As torch's stages do: an operator that finds both kinds of gradients at once runs twice, transfers included."""
    ends = [t.clone() for t in outputs if t.requires_grad]  # their graph is cut off, which views do not allow
    weights: Any = _other_leaves(ends, sources)
    kept = [t.grad_fn for t in ends]  # or torch 2.11 loses the functions that weight gradients start from
    arriving = [gradient for gradient in given if gradient is not None]
    before = storages.start(arriving)
    with recorded(mesh) as steps:  # one record: waits number the transfers of both parts
        with storages:
            gradients, groups = stage_backward_input(ends, arriving, sources, iter(weights))
        found, bytes_inputs, before = len(steps), storages.bytes_peak - before, storages.start()
        with storages:
            stage_backward_weight(iter(weights), [group for group in groups if "grads" in group])
    kept.clear()
    return Backward(steps, list(gradients), bytes_inputs, len(steps) - found, storages.bytes_peak - before)


def _other_leaves(ends: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors besides `sources` that gradients are found for: weights, or the shards that stand for them."""
    known = {id(t) for t in sources}
    found: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    waiting: list[Any] = [t.grad_fn for t in ends]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            found[id(leaf)] = leaf
    return list(found.values())


def _dry(value: Any) -> Any:
    leaves, spec = tree_flatten(value)
    return tree_unflatten(
        [Dry(x.layout, x.dtype, x.requires_grad, order_of(x.local)) if isinstance(x, Sharded) else x for x in leaves],
        spec,
    )
