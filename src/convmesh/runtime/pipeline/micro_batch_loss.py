"""The loss of a batch from the losses of its micro-batches.

Micro-batches have equal sizes, so a mean over samples is the mean of their losses. Cross entropy divides by the weights
of the targets that count, so each micro-batch is weighted by its targets. Other losses are compared with the loss
of the whole batch in the first step; one that is neither the mean nor the sum of its micro-batches' is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from convmesh.dist import OpenMesh, all_reduce
from convmesh.ops.core.sharded import Sharded

Loss = Callable[..., Any]
Kind = Literal["unknown", "mean", "sum", "other"]
KINDS: tuple[Kind, ...] = ("unknown", "mean", "sum", "other")
MEAN, SUM = KINDS[1:3]

REFUSED = (
    "the loss of the whole batch is neither the mean nor the sum of its micro-batches' losses, so a pipeline would "
    "train with other gradients than one device; use `microbatches=1`, or a loss that is a mean over samples (cross "
    "entropy with weights or `ignore_index`: pass `nn.CrossEntropyLoss(...)` or "
    "`functools.partial(F.cross_entropy, ...)` itself)."
)


@dataclass(frozen=True)
class Entropy:
    """The options of a cross entropy, or negative log likelihood, that decide how much each target counts."""

    weight: torch.Tensor | None
    ignore_index: int
    reduction: str

    def counted(self, target: Sharded, mesh: OpenMesh) -> torch.Tensor:
        """The sum of the weights of all targets that count, over the ranks that share the micro-batch."""
        keeps = target.local != self.ignore_index
        if self.weight is None:
            here = keeps.sum(dtype=torch.float64)
        else:
            # The loss itself refuses labels outside the classes.
            classes = target.local.where(keeps, 0).clamp(0, len(self.weight) - 1)
            here = (self.weight.to(target.local.device, torch.float64)[classes] * keeps).sum()
        return all_reduce(here, mesh, target.layout.axes)


def entropy_of(loss: Loss) -> Entropy | None:
    """The options of a loss if it is a known cross entropy."""
    options: dict[str, Any] = {}
    if isinstance(loss, functools.partial):  # `functools` flattens a partial of a partial
        options = {"reduction": "unknown"} if loss.args else loss.keywords
        loss = loss.func
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return Entropy(loss.weight, loss.ignore_index, loss.reduction)
    if loss in (F.cross_entropy, F.nll_loss):
        return Entropy(options.get("weight"), options.get("ignore_index", -100), options.get("reduction", "mean"))
    return None


def kind_of(loss: Loss, targets: Any) -> Kind:
    """Whether the loss is a mean or a sum, if its options say so."""
    entropy = entropy_of(loss)
    if entropy is None or not isinstance(targets, Sharded):
        return "unknown"
    return {"sum": SUM, "mean": MEAN}.get(entropy.reduction, "unknown")


def shares(loss: Loss, kind: Kind, targets: Sequence[Any], mesh: OpenMesh) -> list[float]:
    """The weight of each micro-batch's loss in the batch's."""
    count = len(targets)
    entropy = entropy_of(loss)
    if kind == "sum":
        return [1.0] * count
    if entropy is None or not isinstance(targets[0], Sharded) or targets[0].is_floating_point():
        return [1.0 / count] * count
    counted = torch.stack([entropy.counted(target, mesh) for target in targets])
    weights: list[float] = (counted / counted.sum()).tolist()
    return weights


def compare(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> Kind:
    """Whether a batch's loss is the mean or the sum of its micro-batches' losses, or neither."""
    losses = torch.stack([part.detach().double() for part in parts])
    tolerance = 1e-2 if whole.dtype in (torch.float16, torch.bfloat16) else 1e-4
    kinds: tuple[tuple[Kind, torch.Tensor], ...] = ((MEAN, losses.mean()), (SUM, losses.sum()))
    expected = whole.detach().double()
    same = (kind for kind, loss in kinds if torch.allclose(loss, expected, tolerance, atol=1e-12, equal_nan=True))
    return next(same, "other")
