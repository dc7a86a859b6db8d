"""Losses over classes: `cross_entropy` and `nll_loss`. The classes are dim 1.

If that dim is cut, it stays cut when there are many classes; a few are made whole first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from convmesh.dist import copy_over
from convmesh.errors import UnsupportedError
from convmesh.layout import Layout
from convmesh.ops.core.autocast import autocast_type
from convmesh.ops.core.precision import wide
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded, on_mesh
from convmesh.ops.loss.cut_classes import log_probabilities, scores_of, stay_cut
from convmesh.ops.loss.labels import checked_labels, for_replicas, settle_labels
from convmesh.ops.loss.value_losses import check_reduction, reduced
from convmesh.ops.shape.reshape import make_whole


@implements(F.cross_entropy)
def cross_entropy(
    x: Any,
    target: Any,
    weight: Any = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Sharded:
    """Cross entropy of logits with class indices `(N, …)` or with probabilities in the input's shape."""
    check_reduction("cross_entropy", reduction, (size_average, reduce))
    check_target(x, target, soft=True)
    is_cut = isinstance(x, Sharded) and stay_cut(x.layout)
    if x.shape != target.shape:
        loss = partial(_of_cut_logits if is_cut else _of_logits, label_smoothing=label_smoothing)
        return _of_indices(loss, x, target, weight, ignore_index, reduction)
    if is_cut:
        return _of_cut_probabilities(x, target, weight, reduction, label_smoothing)
    loss = partial(F.cross_entropy, label_smoothing=label_smoothing)
    scores, likely = line_up_classes(x, target)
    layout, mesh = scores.layout, scores.mesh
    (weight,) = copy_over(mesh, layout.axes, _plain(weight))
    losses = loss(scores.local, likely, weight=weight, reduction="none")
    return reduced(losses, without_classes(layout), mesh, reduction)


@implements(F.nll_loss)
def nll_loss(
    x: Any,
    target: Any,
    weight: Any = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Sharded:
    """Minus the log-probability of each target class."""
    check_reduction("nll_loss", reduction, (size_average, reduce))
    check_target(x, target, soft=False)
    is_cut = isinstance(x, Sharded) and stay_cut(x.layout)
    return _of_indices(_of_cut_scores if is_cut else _of_scores, x, target, weight, ignore_index, reduction)


def _of_logits(x: Sharded, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(x.local, labels, reduction="none", **options)


def _of_scores(x: Sharded, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.nll_loss(x.local, labels, reduction="none", **options)


def _of_cut_logits(
    x: Sharded, labels: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, label_smoothing: float
) -> torch.Tensor:
    """Smoothed as in torch: every class gets a small probability, by its weight."""
    x, classes = _widened(x), x.shape[1]
    factors = None if not label_smoothing else x.local.new_ones(classes) if weight is None else weight
    own, every = log_probabilities(x, labels, factors)
    loss = -own * _weights(labels, weight, ignore_index)
    if every is None:
        return loss
    return loss * (1 - label_smoothing) - every * (labels != ignore_index) * (label_smoothing / classes)


def _of_cut_scores(x: Sharded, labels: torch.Tensor, weight: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    return -scores_of(_widened(x), labels) * _weights(labels, weight, ignore_index)


def _widened(x: Sharded) -> Sharded:
    """The scores in the type that autocast computes losses in: float32, on every kind of device."""
    return x if autocast_type(x.device) is None else x.like(x.local.to(wide(x.dtype)))


def _of_cut_probabilities(x: Any, target: Any, weight: Any, reduction: str, label_smoothing: float) -> Sharded:
    likely: Any = on_mesh(target, x.mesh).redistribute(x.layout)
    likely = likely * (1 - label_smoothing) + label_smoothing / x.shape[1]
    if weight is not None:
        likely = likely * weight.view(-1, *[1] * (x.dim() - 2))
    losses = -(F.log_softmax(x, 1) * likely).sum(1)
    return reduced(losses.local, losses.layout, losses.mesh, reduction)


def _of_indices(
    loss: Callable[..., torch.Tensor], x: Any, target: Any, weight: Any, ignore_index: int, reduction: str
) -> Sharded:
    """A mean divides by the weights of all targets that are not ignored; it is NaN if all are, as in torch."""
    scores, given = line_up_classes(x, target, may_stay_cut=True)
    layout, mesh = without_classes(scores.layout), scores.mesh
    labels, poison, note = checked_labels(given, scores.shape[1], ignore_index)
    weight = _plain(weight)
    losses = loss(scores, labels, weight=weight, ignore_index=ignore_index)
    poison = for_replicas(poison, losses, layout, mesh)
    divisor = _weights(labels, weight, ignore_index) if reduction == "mean" else None
    result = reduced(losses, layout, mesh, reduction, divisor, poison)
    settle_labels(result, note)
    return result


def _weights(labels: torch.Tensor, weight: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    counted = labels != ignore_index
    return counted if weight is None else weight[labels.masked_fill(~counted, 0)] * counted


def _plain(weight: Any) -> Any:
    """One weight per class, whole on every rank."""
    return weight.gather() if isinstance(weight, Sharded) else weight


def line_up_classes(x: Any, target: Any, may_stay_cut: bool = False) -> tuple[Sharded, torch.Tensor]:
    """The scores, with dim 1 made whole if it must be, and this rank's part of a target that `check_target` accepts."""
    mesh = next(t.mesh for t in (x, target) if isinstance(t, Sharded))
    given = on_mesh(x, mesh)
    scores = given if may_stay_cut and stay_cut(given.layout) else make_whole(given, [1])
    layout = scores.layout if target.dim() == scores.dim() else without_classes(scores.layout)
    return scores, on_mesh(target, mesh).redistribute(layout).local


def without_classes(layout: Layout) -> Layout:
    """The layout of one value for all classes, without dim 1."""
    return Layout(layout.mesh, (layout.cuts[0], *layout.cuts[2:]))


def check_target(x: Any, target: Any, soft: bool) -> None:
    """Refuse a target that is neither class indices `(N, …)` nor, if `soft`, a value for each class."""
    scores, given = tuple(x.shape), tuple(target.shape)
    if len(scores) < 2:
        raise UnsupportedError(f"`input` has shape {scores}, but a split loss over classes needs samples: (N, C, …).")
    if soft and given == scores:
        return
    indices = (scores[0], *scores[2:])
    if given != indices or target.dtype != torch.int64:
        raise ValueError(
            f"`target` ({target.dtype}, {given}) must hold class indices: torch.int64 of shape {indices}"
            + (f", or a value for each class: the input's shape, {scores}." if soft else ".")
        )
