"""The soft Dice loss of segmentation, on plain and on sharded tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

import torch

from convmesh.dist import sum_over
from convmesh.errors import UnsupportedError
from convmesh.ops.core.precision import wide
from convmesh.ops.core.sharded import Sharded, replicated
from convmesh.ops.loss.class_losses import check_target, line_up_classes, without_classes
from convmesh.ops.loss.labels import LabelNote, checked_labels, for_replicas, raise_here, settle_labels

Activation = Literal["softmax", "sigmoid", "none"]
Either = torch.Tensor | Sharded
Kind = TypeVar("Kind", torch.Tensor, Sharded)
AddUp = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""Maps partial sums over some dims to sums over all ranks that hold parts of those dims."""


def dice_loss(
    input: Kind,  # noqa: A002
    target: Either,
    *,
    activation: Activation = "none",
    batch: bool = False,
    include_background: bool = True,
    smooth: float = 1e-5,
    ignore_index: int | None = None,
) -> Kind:
    """1 − the mean over classes and samples of (2 Σ p·t + smooth) / (Σ p + Σ t + smooth), with sums over space.

    `input` (N, C, …) holds probabilities p, or logits that `activation` turns into them. `target` holds class
    indices (N, …), those equal to `ignore_index` left out, or memberships t in the input's shape. `batch` sums over
    samples too; without `include_background` class 0 does not count.
    """
    _check(activation, include_background, ignore_index, input, target)
    check_target(input, target, soft=True)
    scores, given, add_up = _parts(input, target)
    goal, poison, note = _checked(given, scores, ignore_index)
    probable, actual = _without_ignored(_ACTIVATIONS[activation](_local(scores)), goal, ignore_index)
    sums = _sums_over_space(probable, actual)[..., 0 if include_background else 1 :]
    sums = sums if poison is None else sums + poison
    summed = sums.sum(1, keepdim=True) if batch else sums
    common, predicted, present = add_up(summed, [d for d in range(input.dim()) if d > 1 or (batch and d == 0)])
    scores = (2 * common + smooth) / (predicted + present + smooth)
    count = scores.shape[1] * (1 if batch else input.shape[0])
    loss: torch.Tensor = (1 - add_up(scores.sum(), [] if batch else [0]) / count).to(probable.dtype)
    if isinstance(input, Sharded):
        result = replicated(loss, input.mesh)
        settle_labels(result, note)
        return result
    return loss


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "sigmoid": torch.sigmoid,
    "softmax": partial(torch.softmax, dim=1),
}


def _parts(x: Either, target: Either) -> tuple[Either, torch.Tensor, AddUp]:
    """Scores, the local target, and how sums over ranks are completed; on plain tensors they are complete."""
    if not isinstance(x, Sharded):
        assert isinstance(target, torch.Tensor)
        return x, target, lambda sums, _: sums
    scores, goal = line_up_classes(x, target)
    return scores, goal, lambda sums, dims: sum_over(sums, scores.mesh, scores.layout.axes_of(dims))


def _local(scores: Either) -> torch.Tensor:
    return scores.local if isinstance(scores, Sharded) else scores


def _checked(
    goal: torch.Tensor, scores: Either, ignore_index: int | None
) -> tuple[torch.Tensor, torch.Tensor | None, LabelNote | None]:
    """A target of labels with wrong ones replaced, NaN to add if there are any, and a note on them."""
    if goal.dim() == scores.dim():
        return goal, None, None
    labels, poison, note = checked_labels(goal, scores.shape[1], ignore_index)
    if not isinstance(scores, Sharded):
        raise_here(note)
        return labels, None, note
    return labels, for_replicas(poison, goal, without_classes(scores.layout), scores.mesh), note


def _without_ignored(
    probable: torch.Tensor, target: torch.Tensor, ignore_index: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and memberships, both zero where the target is ignored."""
    if target.dim() == probable.dim():
        return probable, target
    labels = target.unsqueeze(1)
    if ignore_index is None:
        return probable, _memberships(labels, probable)
    counted = labels != ignore_index
    return probable * counted, _memberships(labels.masked_fill(~counted, 0), probable) & counted


def _memberships(labels: torch.Tensor, probable: torch.Tensor) -> torch.Tensor:
    """One bool per class: an eighth of the memory of torch's `one_hot`."""
    return torch.zeros_like(probable, dtype=torch.bool).scatter_(1, labels, True)


def _sums_over_space(probable: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Σ p·t, Σ p and Σ t for every sample and class: a tensor (3, N, C)."""
    dtype = wide(probable.dtype)
    space = tuple(range(2, probable.dim() + 1))
    return torch.stack([t.unsqueeze(-1).sum(space, dtype=dtype) for t in (probable * actual, probable, actual)])


def _check(activation: str, include_background: bool, ignore_index: int | None, x: Either, target: Either) -> None:
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(f"`activation` (={activation!r}) must be one of {', '.join(_ACTIVATIONS)}.")
    if isinstance(target, Sharded) and not isinstance(x, Sharded):
        raise UnsupportedError("`target` is Sharded, but `input` is not; pass `replicated(input, mesh)`.")
    if ignore_index is not None and x.dim() == target.dim():
        raise UnsupportedError(f"`ignore_index` (={ignore_index}) is for targets of class indices, not of memberships.")
    if x.dim() > 1 and x.shape[1] == 1 and not include_background:
        raise UnsupportedError("`include_background` is False, but the only class of `input` is the background.")
