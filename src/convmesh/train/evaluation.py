"""Losses and metrics over a whole data set, on the mesh: each value is counted once, uneven last batches included."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from convmesh.dist import OpenMesh, all_reduce
from convmesh.errors import ConfigError
from convmesh.layout import Layout
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.loss.class_losses import line_up_classes, without_classes
from convmesh.runtime import ParallelNet

Shards = tuple[Any, Any]
Results = dict[str, Any]


class Metric(ABC):
    """Adds up this rank's share, batch by batch; the sums of all ranks give the result."""

    sums: torch.Tensor | None = None

    def add(self, output: Sharded, target: Sharded) -> None:
        """Count one batch, on the first of the ranks that hold the same values."""
        layout, part = self._part(output, target)
        part = part.double() if _counts(output.mesh, layout) else torch.zeros_like(part, dtype=torch.float64)
        self.sums = part if self.sums is None else self.sums + part

    def result(self, mesh: OpenMesh) -> Results:
        """The metric over everything added, the same on every rank."""
        assert self.sums is not None
        return self._result(all_reduce(self.sums, mesh, tuple(mesh.mesh.axes)).cpu())

    @abstractmethod
    def _part(self, output: Sharded, target: Sharded) -> tuple[Layout, torch.Tensor]:
        """The layout of what was compared, and this rank's sums of it."""

    @abstractmethod
    def _result(self, sums: torch.Tensor) -> Results: ...


class Accuracy(Metric):
    """The fraction of targets whose class has the highest score."""

    def _part(self, output: Sharded, target: Sharded) -> tuple[Layout, torch.Tensor]:
        scores, labels = line_up_classes(output, target)
        known = labels >= 0
        right = (scores.local.argmax(1) == labels) & known
        return without_classes(scores.layout), torch.stack([right.sum(), known.sum()])

    def _result(self, sums: torch.Tensor) -> Results:
        return {"accuracy": float(sums[0] / sums[1])}


class Dice(Metric):
    """Twice the common voxels over the sum of predicted and actual ones, per class over all samples.

    `dice` is the mean over the classes that occur, without the background, class 0.
    """

    def _part(self, output: Sharded, target: Sharded) -> tuple[Layout, torch.Tensor]:
        scores, labels = line_up_classes(output, target)
        classes, known = output.shape[1], labels >= 0
        guess, labels = scores.local.argmax(1)[known], labels[known]
        counts = [torch.bincount(each, minlength=classes) for each in (guess[guess == labels], guess, labels)]
        return without_classes(scores.layout), torch.stack(counts)

    def _result(self, sums: torch.Tensor) -> Results:
        common, guessed, actual = sums
        occurs = guessed + actual > 0
        by_class = torch.where(occurs, 2 * common / (guessed + actual).clamp(min=1), torch.nan)
        foreground = by_class[1:][occurs[1:]]
        mean = foreground.mean() if len(foreground) else by_class[0]
        return {"dice": float(mean), "dice_classes": [None if d.isnan() else float(d) for d in by_class]}


class RSquared(Metric):
    """1 − the squared errors over the squared deviations from the mean, for each output; `r2` is the lowest of them.

    None for an output whose targets are all equal.
    """

    def _part(self, output: Sharded, target: Sharded) -> tuple[Layout, torch.Tensor]:
        scores, values = line_up_classes(output, target)
        others = [dim for dim in range(values.dim()) if dim != 1]
        truth, guess = values.double(), scores.local.double()
        count = torch.full_like(truth, 1)
        sums = [t.sum(others) for t in ((guess - truth).square(), truth, truth.square(), count)]
        return scores.layout, torch.stack(sums)

    def _result(self, sums: torch.Tensor) -> Results:
        errors, total, squares, count = sums
        spread = squares - total.square() / count
        r2 = [float(1 - e / s) if s > 0 else None for e, s in zip(errors, spread, strict=True)]
        known = [each for each in r2 if each is not None]
        return {"r2": min(known, default=None), "r2_outputs": r2}


METRICS: dict[str, Callable[[], Metric]] = {"accuracy": Accuracy, "dice": Dice, "r2": RSquared}


def metric_names(chosen: Sequence[str], target: torch.dtype, target_dims: int) -> tuple[str, ...]:
    """What "auto" stands for: r2 for values, dice for a class per voxel, accuracy for a class per sample."""
    auto = "r2" if target.is_floating_point else "accuracy" if target_dims == 0 else "dice"
    for name in chosen:
        if name != "auto" and (name == "r2") != target.is_floating_point:
            kind = "values" if target.is_floating_point else "classes"
            raise ConfigError(
                f"`evaluation.metrics` has {name!r}, which is for {'values' if name == 'r2' else 'classes'}, but the "
                f"targets of this data are {kind}; use {auto!r}, or 'auto'."
            )
    return tuple(dict.fromkeys(auto if name == "auto" else name for name in chosen))


@torch.no_grad()
def evaluate(
    net: ParallelNet, loss: Callable[..., Any] | None, batches: Iterable[Shards], metrics: Sequence[str] = ()
) -> Results:
    """The mean loss per sample and the metrics over `batches` of this rank's shards; the same on every rank."""
    chosen = [METRICS[name]() for name in metrics]
    total, samples, was_training = 0.0, 0, net.training
    net.eval()
    try:
        for x, target in batches:
            output, goal = net.output_and_target(x, target)
            samples += output.shape[0]
            if loss is not None:
                total += float(loss(output, goal).local) * output.shape[0]
            for metric in chosen:
                metric.add(output, goal)
    finally:
        net.train(was_training)
    results: Results = {} if loss is None or not samples else {"loss": total / samples}
    return results | {key: value for metric in chosen for key, value in metric.result(net.mesh).items()}


def _counts(mesh: OpenMesh, layout: Layout) -> bool:
    """Whether this rank is the first of those that hold the same part."""
    here = mesh.mesh.coordinates(mesh.rank)
    return all(place == 0 for axis, place in here.items() if axis not in layout.axes)
