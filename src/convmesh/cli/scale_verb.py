"""`convmesh scale MODEL --gpus 1..4096 --system S`: how far does each strategy scale, and what stops it?"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from convmesh.cli.captured_subjects import (
    Precision,
    captured_for,
    default_batch,
    sample_shape,
    subject_without_data,
    tf32_of,
)
from convmesh.cli.exits import BadInputError, Exit, check_writable
from convmesh.cli.progress import progress
from convmesh.errors import InfeasibleError

if TYPE_CHECKING:
    from convmesh.cli.subjects import Subject
    from convmesh.graph import Captured
    from convmesh.oracle.scaling_limits import Curve
    from convmesh.planner.scaling import Scaling
    from convmesh.system import System

STRONG_RANKS = 64
"""Strong scaling keeps the batch that so many devices would have, unless one is given."""


@dataclass(frozen=True)
class ScaleOptions:
    """What can be typed after `convmesh scale`."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A reference network's name, or package.module:factory."""
    gpus: str
    """Numbers of devices: 1..4096 for 1, 2, 4 and so on up to 4096; or the largest alone, from 1 on."""
    system: str = "dgx-a100"
    """The cluster: one that ships with ConvMesh, or the path of a description of yours."""
    input: str | None = None
    """One sample's shape without the batch, e.g. 1x128x128x128; reference networks know theirs."""
    batch: int | None = None
    """Samples of the global batch for strong scaling, of one device for weak scaling."""
    scaling: Literal["strong", "weak", "both"] = "both"
    """Strong: the same batch on more devices. Weak: as many samples for each device."""
    strategies: tuple[str, ...] = ()
    """Strategies to look at; by default data, spatial, filter, pipeline, data+spatial and data+filter."""
    precision: Precision = "float32"
    """Type of weights, gradients, optimiser states and activations alike; tf32 is float32 on tensor cores in all
    products, float32 in convolutions alone, as in torch."""
    batchnorm: Literal["global", "replica"] = "global"
    """Whose samples a batch norm looks at: all of the batch, or those of one replica, as DDP does."""
    svg: Path | None = None
    """Where to write the plot as a picture."""
    json: bool = False
    """Print the result as JSON, and nothing else, on stdout."""


def run(options: ScaleOptions) -> int:
    """Predict all points and report."""
    counts = parse_counts(options.gpus)
    if options.batch is not None and options.batch < 1:
        raise BadInputError(f"`--batch` (={options.batch}) must be a positive number of samples.")
    if options.svg is not None:
        check_writable("--svg", options.svg)
    from convmesh.system import System

    system = System.load(options.system)
    _check(options, counts, system)
    subject = subject_without_data(options.model, options.input)
    sample = sample_shape(options.model, subject, options.input)
    kinds = ("strong", "weak") if options.scaling == "both" else (options.scaling,)
    found = {kind: _scaled(options, kind, counts, system, subject, sample) for kind in kinds}
    _check_any(found)
    _report(options, found)
    return Exit.DONE


def parse_counts(text: str) -> list[int]:
    """`1..4096` or `4096`: powers of two from the first on, and the last."""
    if not re.fullmatch(r"[1-9]\d*(\.\.[1-9]\d*)?", text.strip()):
        raise BadInputError(f"`--gpus` (={text!r}) must be a number of devices, or two as in 1..4096.")
    first, last = text.split("..") if ".." in text else ("1", text)
    if int(first) > int(last):
        raise BadInputError(f"`--gpus` (={text!r}) must rise: {last}..{first}.")
    counts = [int(first)]
    while counts[-1] * 2 <= int(last):
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == int(last) else [*counts, int(last)]


def _check(options: ScaleOptions, counts: list[int], system: System) -> None:
    from convmesh.planner.searching import check_ranks
    from convmesh.plans.presets import STRATEGIES

    check_ranks("--gpus", counts[-1], system)
    if unknown := [name for name in options.strategies if name not in STRATEGIES]:
        raise BadInputError(f"`--strategies` has {unknown[0]!r}, which is none; there are {', '.join(STRATEGIES)}.")


def _check_any(found: Mapping[str, Scaling]) -> None:
    """Refuse if there is nothing to show: no strategy has a plan for any number of devices."""
    curves = [curve for scaling in found.values() for curve in scaling.curves]
    if not any(point.ranked for curve in curves for point in curve.points):
        reasons = dict.fromkeys(f"\n  {curve.strategy}: {curve.points[-1].reason}" for curve in curves)
        raise InfeasibleError(f"no plan fits; use more devices, a smaller batch or a smaller sample:{''.join(reasons)}")


def _scaled(
    options: ScaleOptions, kind: str, counts: list[int], system: System, subject: Subject, sample: tuple[int, ...]
) -> Scaling:
    from convmesh.oracle import Assumptions
    from convmesh.planner.drafting import DraftOptions
    from convmesh.planner.scaling import SCALED, scale

    known: dict[int, Captured] = {}

    def capture(ranks: int) -> Captured:
        each = options.batch or default_batch(sample, 1)
        batch = (options.batch or default_batch(sample, STRONG_RANKS)) if kind == "strong" else each * ranks
        if batch not in known:
            known[batch] = captured_for(subject, (batch, *sample), options.precision)
        return known[batch]

    assumed = Assumptions(tf32=tf32_of(options.precision))
    told = lambda message: progress(f"{kind} scaling: {message}")  # noqa: E731
    drafts = DraftOptions(batchnorm=options.batchnorm)
    return scale(capture, system, counts, options.strategies or SCALED, assumed, told, options=drafts)


def _report(options: ScaleOptions, found: dict[str, Scaling]) -> None:
    from convmesh.cli.scale_plot import svg

    if options.svg is not None:
        try:
            options.svg.write_text(svg(found), encoding="utf-8")
        except OSError as error:
            raise BadInputError(f"`--svg` (={str(options.svg)!r}): {error.strerror}.") from None
    if options.json:
        plain = {kind: [_curve(scaling, curve) for curve in scaling.curves] for kind, scaling in found.items()}
        sys.stdout.write(json.dumps(plain, indent=2) + "\n")
        return
    from convmesh.cli.scale_table import show

    show(options, found)


def _curve(scaling: Scaling, curve: Curve) -> dict[str, Any]:
    limit = curve.limit
    points = [
        {
            "ranks": point.ranks,
            "batch": point.batch,
            "mesh": dict(point.ranked.mesh.axes) if point.ranked else None,
            "seconds_step": point.ranked.prediction.seconds_step if point.ranked else None,
            "samples_per_second": point.samples_per_second,
            "efficiency": scaling.efficiency(point),
            "reason": point.reason,
        }
        for point in curve.points
    ]
    bound = None if limit is None else {"ranks": limit.ranks, "term": limit.term, "reason": limit.reason}
    return {"strategy": curve.strategy, "points": points, "limit": bound}
