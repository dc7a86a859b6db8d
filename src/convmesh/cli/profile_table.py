"""A profiled run as plain values, and those as a readable page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from convmesh.oracle.simulate.stand_ins import Crowd
from convmesh.oracle.simulate.step_times import Scheduled
from convmesh.profiling.findings import findings
from convmesh.profiling.profile_folder import ProfiledRun
from convmesh.profiling.rank_times import TimedRun
from convmesh.runtime.compiled.layer_tags import BETWEEN

MOST_NAMED = 3
"""Rows of up to this many layers name all of them; `--json` names the layers of every row."""
COLUMNS = ("compute", "exposed", "idle", "data", "other", "step", "hidden")


def as_plain(profiled: ProfiledRun, trace: Path) -> dict[str, Any]:
    """Everything, in seconds."""
    run, prediction = profiled.run, profiled.prediction
    return {
        "steps": [step.steps[run.ranks[0]].step for step in run.steps],
        "mesh": dict(run.mesh.axes),
        "ranks": [{"rank": rank, **asdict(run.times(rank))} for rank in run.ranks],
        "predicted": None if prediction is None else _predicted(prediction.parts, run.accumulate),
        "layers": _layers(profiled),
        "by_layer": run.by_layer,
        "anomalies": [asdict(anomaly) for anomaly in findings(run, prediction)],
        "slowdown": profiled.slowdown,
        "trace": str(trace),
    }


def _predicted(parts: Scheduled, times: int) -> dict[str, float]:
    compute = parts.compute.value + parts.update.value
    return {
        "rank": parts.rank,
        "compute": times * compute,
        "exposed": times * parts.exposed.value,
        "idle": times * parts.idle.value,
        "step": times * parts.step.value,
        "hidden": times * parts.hidden.value,
    }


def _layers(profiled: ProfiledRun) -> list[dict[str, Any]]:
    """By layer and phase: the time of the slowest rank, which rank that is, and the prediction."""
    run = profiled.run
    by_rank = {rank: run.layers(rank) for rank in run.ranks}
    sent = _waits(run)
    expected = {rank: _expected(profiled, rank) for rank in run.ranks}
    rows = []
    for layer, phase in dict.fromkeys(cell for cells in by_rank.values() for cell in cells):
        cell = (layer, phase)
        rank = max(by_rank, key=lambda each: by_rank[each].get(cell, 0.0))
        exposed, idle = sent.get(cell, (0.0, 0.0))
        seconds = by_rank[rank].get(cell, 0.0)
        row = {"layer": layer, "phase": phase, "compute": seconds, "rank": rank, "exposed": exposed, "idle": idle}
        rows.append(row | {"predicted": expected[rank].get(cell)})
    return sorted(rows, key=lambda row: -row["compute"])


def _waits(run: TimedRun) -> dict[tuple[str, str], tuple[float, float]]:
    """By layer and phase: seconds of exposed transfers and of idleness, the mean over ranks and steps."""
    waits: dict[tuple[str, str], tuple[float, float]] = {}
    share = 1 / len(run.ranks) / len(run.steps)
    for match in (match for step in run.steps for own in step.matches.values() for match in own):
        cell = (match.crossing.layer, match.crossing.phase)
        exposed, idle = waits.get(cell, (0.0, 0.0))
        waits[cell] = exposed + share * match.exposed, idle + share * match.idle
    return waits


def _expected(profiled: ProfiledRun, rank: int) -> dict[tuple[str, str], float]:
    """The times of the stand-in rank for this one: stages have their own layers."""
    if profiled.prediction is None:
        return {}
    timeline, times = profiled.prediction.parts.timeline, profiled.run.accumulate
    alike = Crowd(profiled.prediction.mesh, timeline.ranks).stand_in(rank)
    return {cell: times * seconds for cell, seconds in timeline.seconds_by_layer(alike).items()}


def as_text(told: dict[str, Any], layers: int) -> str:
    """The page."""
    return "\n".join([*_heading(told), "", *_rank_rows(told), "", *_layer_rows(told, layers), "", *_ending(told)])


def _heading(told: dict[str, Any]) -> Iterator[str]:
    steps, mesh = told["steps"], ", ".join(f"{axis} {size}" for axis, size in told["mesh"].items())
    yield f"Steps {steps[0]} to {steps[-1]} on {len(told['ranks'])} ranks ({mesh or 'one rank'}), ms of a mean step:"


def _rank_rows(told: dict[str, Any]) -> Iterator[str]:
    yield f"{'rank':>10}" + "".join(f"{name:>10}" for name in COLUMNS)
    for row in told["ranks"]:
        yield f"{row['rank']:>10}" + "".join(_ms(row[name]) for name in COLUMNS)
    if told["predicted"]:
        yield f"{'predicted':>10}" + "".join(_ms(told["predicted"].get(name)) for name in COLUMNS)
    yield "exposed: transfers that were waited for; idle: waiting for other ranks; hidden: transfers behind computing,"
    yield "which is no part of the step."


def _layer_rows(told: dict[str, Any], layers: int) -> Iterator[str]:
    if not told["by_layer"]:
        yield "Compiled: what runs between two transfers is one row, named by its layers."
    width = max([20, *(len(_name(row)) for row in told["layers"][:layers])])
    yield f"{'layer':{width}}{'compute':>10}{'predicted':>10}{'exposed':>10}{'idle':>10}{'on rank':>10}"
    for row in told["layers"][:layers]:
        times = "".join(_ms(row[key]) for key in ("compute", "predicted", "exposed", "idle"))
        yield f"{_name(row):{width}}{times}{row['rank']:>10}"


def _name(row: dict[str, Any]) -> str:
    """A row's layer and phase; the first and last of many layers."""
    layers = row["layer"].split(BETWEEN)
    layer = row["layer"] if len(layers) <= MOST_NAMED else f"{layers[0]} to {layers[-1]} ({len(layers)} layers)"
    return f"{layer} {row['phase']}".strip()


def _ending(told: dict[str, Any]) -> Iterator[str]:
    if told["anomalies"]:
        yield "Off:"
        yield from (f"  {anomaly['sentence']}" for anomaly in told["anomalies"])
    else:
        yield "No rank, layer or link is off."
    if told["predicted"] is None:
        yield "The run has no prediction (prediction.json says why), so layers and links are not judged."
    if told["slowdown"] is not None:
        yield f"Profiled steps took {told['slowdown']:.2f}x the run's other steps."
    yield f"Trace: {told['trace']} (open it at https://ui.perfetto.dev)"


def _ms(seconds: float | None) -> str:
    return f"{'-':>10}" if seconds is None else f"{seconds * 1e3:>10.4g}"
