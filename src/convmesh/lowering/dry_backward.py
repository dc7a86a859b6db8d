"""The backward pass of one call in a dry run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from convmesh.dist import OpenMesh
from convmesh.kernels.memory_format import strides_of
from convmesh.lowering.live_bytes import HeldMoments
from convmesh.lowering.recorder import recorded
from convmesh.lowering.value_flow import ValueFlow
from convmesh.plans import Step
from convmesh.plans.fused.flow import Touch
from convmesh.private_torch.pipeline_stages import stage_backward_input, stage_backward_weight

Gradients = list[torch.Tensor | None]


@dataclass(frozen=True)
class Backward:
    """What a call's backward does and finds."""

    steps: list[Step]
    gradients: Gradients
    """Gradients of the tensors that the call was given."""
    bytes_peak: int
    weight_steps: int = 0
    """How many of the last steps are for weights alone."""
    bytes_weights: int = 0
    """Most bytes that those steps hold."""
    moments: tuple[tuple[int, ...], ...] = ((0,), (0,))
    """Bytes held in the course of each part."""
    touches: Mapping[int, Touch] = field(default_factory=dict)
    """By step: what it reads and makes, if requested."""


def run_backward(
    mesh: OpenMesh,
    outputs: Sequence[torch.Tensor],
    ends: Gradients,
    sources: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    storages: HeldMoments,
    splits: bool,
    flow: ValueFlow | None = None,
) -> Backward:
    """Backpropagate from the gradients of the outputs; `splits`: to the sources first, then to the weights."""
    wanted, learning = [t for t in sources if t.requires_grad], [w for w in weights if w.requires_grad]
    if splits and wanted and learning and any(t.requires_grad for t in outputs):
        back = _split_backward(mesh, outputs, ends, wanted, storages)
    else:
        before = storages.start(ends)
        with recorded(mesh, storages, flow) as steps:
            gradients = _gradients(outputs, ends, wanted, learning)
        touches = {} if flow is None else flow.touches
        moments = (storages.above(before), (0,))
        back = Backward(steps, gradients, storages.bytes_peak - before, moments=moments, touches=touches)
    each = iter(back.gradients)
    return replace(back, gradients=[next(each) if t.requires_grad else None for t in sources])


def _gradients(
    outputs: Sequence[torch.Tensor], ends: Gradients, sources: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> Gradients:
    """The gradients of `sources` from those of the outputs, computed together with those of the weights."""
    learning = [t for t in outputs if t.requires_grad]
    if not learning or not (sources or weights):
        return [None] * len(sources)
    given = [end for end in ends if end is not None]
    gradients: Gradients = list(torch.autograd.grad(learning, [*sources, *weights], given, allow_unused=True))
    for weight, gradient in zip(weights, gradients[len(sources) :], strict=True):
        # `.grad` has the strides of its weight.
        if gradient is not None and strides_of(gradient) != strides_of(weight):
            torch.empty_like(weight).copy_(gradient)
    return gradients[: len(sources)]


def _split_backward(
    mesh: OpenMesh,
    outputs: Sequence[torch.Tensor],
    given: Gradients,
    sources: list[torch.Tensor],
    storages: HeldMoments,
) -> Backward:
    """As torch's stages do: an operator that finds both kinds of gradients at once runs twice, transfers included."""
    ends = [t.clone() for t in outputs if t.requires_grad]  # their graph is cut off, which views do not allow
    weights: Any = other_leaves(ends, sources)
    kept = [t.grad_fn for t in ends]  # or torch 2.11 loses the functions that weight gradients start from
    arriving = [gradient for gradient in given if gradient is not None]
    before = storages.start(arriving)
    with recorded(mesh, storages) as steps:  # one record: waits number the transfers of both parts
        gradients, groups = stage_backward_input(ends, arriving, sources, iter(weights))
        of_inputs = storages.above(before)
        steps_of_inputs, bytes_inputs, before = len(steps), storages.bytes_peak - before, storages.start()
        stage_backward_weight(iter(weights), [group for group in groups if "grads" in group])
    kept.clear()
    moments = of_inputs, storages.above(before)
    return Backward(
        steps, list(gradients), bytes_inputs, len(steps) - steps_of_inputs, storages.bytes_peak - before, moments
    )


def other_leaves(ends: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors other than `sources` that get gradients: weights, or the shards that stand for them."""
    known = {id(t) for t in sources}
    leaves: dict[int, torch.Tensor] = {}
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
            leaves[id(leaf)] = leaf
    return list(leaves.values())
