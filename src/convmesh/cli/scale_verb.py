"""`convmesh scale MODEL --gpus 1..4096 --system S`: how far does each strategy scale, and what stops it?"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from convmesh.cli.captured_subjects import (
    PlannedNetwork,
    Precision,
    autocast_of,
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
"""Without `--batch`, strong scaling uses the default batch for this number of devices."""


@dataclass(frozen=True, kw_only=True)
class ScaleOptions(PlannedNetwork):
    """Options of `convmesh scale`."""

    gpus: str
    """Device counts: 1..4096 means 1, 2, 4 and so on up to 4096; 4096 alone means the same."""
    batch: int | None = None
    """Global batch size for strong scaling; batch size per device for weak scaling."""
    scaling: Literal["strong", "weak", "both"] = "both"
    """Strong: the same batch on more devices. Weak: the same batch on each device."""
    strategies: tuple[str, ...] = ()
    """Strategies to consider; by default data, spatial, filter, pipeline, data+spatial and data+filter."""
    svg: Path | None = None
    """Where to write the plot as an SVG."""
    json: bool = False
    """Print only JSON on stdout."""


def run(options: ScaleOptions) -> int:
    """Predict all points and report."""
    from convmesh.oracle.search.rare_collection import rare_collection

    with rare_collection():  # also while torch is imported
        return _run(options)


def _run(options: ScaleOptions) -> int:
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
    captured = _captures(subject, sample, options.precision)
    scalings = {kind: _scaled(options, kind, counts, system, captured, sample) for kind in kinds}
    _check_any(scalings)
    _report(options, scalings)
    return Exit.DONE


def parse_counts(text: str) -> list[int]:
    """Device counts of `1..4096` or `4096`: the first, its doublings, and the last."""
    if not re.fullmatch(r"[1-9]\d*(\.\.[1-9]\d*)?", text.strip()):
        raise BadInputError(f"`--gpus` (={text!r}) must be a number of devices, or a range such as 1..4096.")
    first, last = text.split("..") if ".." in text else ("1", text)
    if int(first) > int(last):
        raise BadInputError(f"`--gpus` (={text!r}) must rise; use {last}..{first}.")
    counts = [int(first)]
    while counts[-1] * 2 <= int(last):
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == int(last) else [*counts, int(last)]


def _check(options: ScaleOptions, counts: list[int], system: System) -> None:
    from convmesh.planner.searching import check_ranks
    from convmesh.plans.presets import STRATEGIES

    check_ranks("--gpus", counts[-1], system)
    if unknown := [name for name in options.strategies if name not in STRATEGIES]:
        raise BadInputError(f"`--strategies` (={unknown[0]!r}) must be among {', '.join(STRATEGIES)}.")


def _check_any(scalings: Mapping[str, Scaling]) -> None:
    """Refuse if no strategy has a plan for any number of devices."""
    curves = [curve for scaling in scalings.values() for curve in scaling.curves]
    if not any(point.ranked for curve in curves for point in curve.points):
        reasons = dict.fromkeys(f"\n  {curve.strategy}: {curve.points[-1].reason}" for curve in curves)
        raise InfeasibleError(f"no plan fits; use more devices, a smaller batch or a smaller sample:{''.join(reasons)}")


def _captures(subject: Subject, sample: tuple[int, ...], precision: Precision) -> Callable[[int], Captured]:
    """The network captured for a batch, once; all captures share their dry runs."""
    from convmesh.lowering.lowering_cache import share_dry_runs

    by_batch: dict[int, Captured] = {}

    def captured(batch: int) -> Captured:
        if batch not in by_batch:
            by_batch[batch] = captured_for(subject, (batch, *sample), precision)
            share_dry_runs(next(iter(by_batch.values())), by_batch[batch])
        return by_batch[batch]

    return captured


def _scaled(
    options: ScaleOptions,
    kind: str,
    counts: list[int],
    system: System,
    captured: Callable[[int], Captured],
    sample: tuple[int, ...],
) -> Scaling:
    from convmesh.oracle import Assumptions
    from convmesh.planner.drafting import DraftOptions
    from convmesh.planner.scaling import SCALED, scale

    def capture(ranks: int) -> Captured:
        per_device = options.batch or default_batch(sample, 1)
        strong = options.batch or default_batch(sample, STRONG_RANKS)
        return captured(strong if kind == "strong" else per_device * ranks)

    assumed = Assumptions(tf32=tf32_of(options.precision))
    report = lambda message: progress(f"{kind} scaling: {message}")  # noqa: E731
    precision = autocast_of(options.precision)
    drafts = DraftOptions(batchnorm=options.batchnorm, precision=precision, compile=options.compile)
    return scale(capture, system, counts, options.strategies or SCALED, assumed, report, options=drafts)


def _report(options: ScaleOptions, scalings: dict[str, Scaling]) -> None:
    from convmesh.cli.scale_plot import svg

    if options.svg is not None:
        try:
            options.svg.write_text(svg(scalings), encoding="utf-8")
        except OSError as error:
            raise BadInputError(f"`--svg` (={str(options.svg)!r}): {error.strerror}.") from None
    if options.json:
        plain = {kind: [_curve(scaling, curve) for curve in scaling.curves] for kind, scaling in scalings.items()}
        sys.stdout.write(json.dumps(plain, indent=2) + "\n")
        return
    from convmesh.cli.scale_table import show

    show(options, scalings)


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
