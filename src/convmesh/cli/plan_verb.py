"""`convmesh plan MODEL --gpus N --system S`: which strategy, and on which mesh?"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from convmesh.cli.captured_subjects import (
    PlannedNetwork,
    autocast_of,
    captured_for,
    default_batch,
    sample_shape,
    subject_without_data,
    tf32_of,
)
from convmesh.cli.exits import BadInputError, Exit, check_writable
from convmesh.cli.progress import progress

if TYPE_CHECKING:
    from convmesh.oracle.search import Ranked, SearchResult


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PlannedNetwork):
    """Options of `convmesh plan`."""

    gpus: int
    """Number of devices, one rank on each."""
    batch: int | None = None
    """Global batch size; by default 32 per device, or 1 per device for volumes."""
    objective: Literal["time", "epoch", "memory", "energy", "cost"] = "time"
    """What to minimise."""
    samples: int | None = None
    """Samples per epoch, for the objective `epoch`."""
    strategies: tuple[str, ...] = ()
    """Strategies to consider; by default all of them, and per-layer mixes of splits."""
    optimizer: Literal["sgd", "momentum", "adam"] = "momentum"
    """Optimiser, which determines the memory for its states."""
    save: Path | None = None
    """Where to write the best plan; by default MODEL.plan.toml in the current folder."""
    top: int = 8
    """Number of plans to print."""
    json: bool = False
    """Print only JSON on stdout."""


def run(options: PlanOptions) -> int:
    """Search, save the best plan and report."""
    from convmesh.oracle.search.rare_collection import rare_collection

    with rare_collection():  # also while torch is imported
        return _run(options)


def _run(options: PlanOptions) -> int:
    _check(options)
    from convmesh.oracle import Assumptions
    from convmesh.planner.drafting import DraftOptions
    from convmesh.planner.searching import check_ranks, search_captured
    from convmesh.system import System

    path = options.save or Path(f"{options.model.rpartition(':')[2]}.plan.toml")
    check_writable("--save", path)
    system = System.load(options.system)
    check_ranks("--gpus", options.gpus, system)
    subject = subject_without_data(options.model, options.input)
    sample = sample_shape(options.model, subject, options.input)
    shape = (options.batch or default_batch(sample, options.gpus), *sample)
    result = search_captured(
        captured_for(subject, shape, options.precision),
        system,
        options.gpus,
        options.objective,
        options.samples,
        options.strategies or None,
        options=DraftOptions(
            batchnorm=options.batchnorm, precision=autocast_of(options.precision), compile=options.compile
        ),
        assumptions=Assumptions(optimizer=options.optimizer, tf32=tf32_of(options.precision)),
        progress=progress,
    )
    _save(result.best, path)
    _report(options, result, shape, path)
    return Exit.DONE


def _check(options: PlanOptions) -> None:
    numbers = {"gpus": options.gpus, "batch": options.batch, "top": options.top, "samples": options.samples}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise BadInputError(f"`--{name}` (={value}) must be a positive number.")
    if options.objective == "epoch" and options.samples is None:
        raise BadInputError("`--objective epoch` needs `--samples`, the number of samples per epoch.")


def _save(best: Ranked, path: Path) -> None:
    try:
        best.plan.save(path)
    except OSError as error:
        raise BadInputError(f"`--save` (={str(path)!r}): {error.strerror}.") from None


def _report(options: PlanOptions, result: SearchResult, shape: tuple[int, ...], path: Path) -> None:
    if options.json:
        sys.stdout.write(json.dumps(to_plain(result, path), indent=2) + "\n")
        return
    from convmesh.cli.plan_table import show

    show(options, result, shape, path)


def to_plain(result: SearchResult, path: Path) -> dict[str, Any]:
    """The search result in the JSON shape that other tools read."""
    from convmesh.oracle.search.why_best import why

    rejected = [{"strategy": r.strategy, "mesh": dict(r.mesh.axes), "reason": r.reason} for r in result.rejected]
    best = {**_row(result, result.best), "path": str(path), "reasons": why(result)}
    return {"best": best, "plans": [_row(result, ranked) for ranked in result.plans], "rejected": rejected}


def _row(result: SearchResult, ranked: Ranked) -> dict[str, Any]:
    prediction = ranked.prediction
    return {
        "strategy": ranked.strategy,
        "mesh": dict(ranked.mesh.axes),
        "seconds_step": prediction.seconds_step,
        "efficiency": result.efficiency(ranked),
        "bytes_memory": prediction.bytes_memory,
        "bytes_sent": prediction.bytes_sent,
        "joules_step": prediction.joules_step,
    }
