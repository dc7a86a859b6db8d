"""The page from a folder of results: what the oracle predicts for every step, from the timed operators alone."""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.oracle_gpu.cases import CASES, HELD_OUT, Case
from benchmarks.oracle_gpu.worker import plan_of, program_of
from convmesh.kernels.tuned.conv_table import shipped_table
from convmesh.measure.operator_times import distinct_works
from convmesh.measure.tuned_timings import tuned_timings
from convmesh.oracle import Assumptions, Prediction, predict_programs
from convmesh.plans import Program
from convmesh.plans.fused.fused_program import fused
from convmesh.system import System
from convmesh.system.operator_table import TUNED, OperatorTable, Overheads, Timing, UpdateTiming

DEVICE_NAME = "NVIDIA H200"
LEFT_OUT = "fused_sums."
"""Timings that are in the results and not used: of stand-ins for sums that seem to write a value to memory first."""


@dataclass(frozen=True, slots=True)
class Row:
    """A step: measured, and predicted."""

    case: Case
    kind: str
    run: dict[str, Any]
    prediction: Prediction
    tuned: list[Timing]
    """Of its convolutions by our own kernels."""

    @property
    def accuracy(self) -> float:
        measured: float = self.run["seconds"]
        return 1 - abs(self.prediction.seconds_step - measured) / measured

    @property
    def cells(self) -> str:
        run, found = self.run, self.prediction
        low, _, high = statistics.quantiles(run["blocks"], n=4)
        return (
            f"| {self.case.model} {'×'.join(map(str, self.case.shape))} | {self.kind} | {1e3 * run['seconds']:.2f} "
            f"| {1e3 * low:.2f} to {1e3 * high:.2f} | {1e3 * found.seconds_step:.2f} | {self.accuracy:.1%} |"
        )


def evaluate(folder: Path, table: Path | None = None) -> str:
    """A page's table of all steps that were measured, and the mean accuracy."""
    measured = joined([_read(file) for file in sorted(folder.rglob("measured*.json*"))])
    shipped = System.load("dgx-h200")
    assert shipped.operators is not None
    operators = added_to(shipped.operators, table_of(measured))
    rows = list(_rows(measured["found"], shipped, operators))
    if table is not None:
        replace(operators, timings=(*operators.timings, *_tuned(rows, operators))).save(table)
    head = "| network | step | measured ms | quartiles | predicted ms | accuracy |"
    lines = [head, "| --- | --- | --- | --- | --- | --- |", *(row.cells for row in rows)]
    kinds = [(kind, [row.accuracy for row in rows if row.kind == kind]) for kind in ("eager", "compiled")]
    means = [f"Mean accuracy, {kind}: {statistics.mean(found):.1%}." for kind, found in kinds if found]
    held = [row.accuracy for row in rows if row.kind == "compiled" and row.case.model in HELD_OUT]
    means += [f"Of these, held out, compiled: {statistics.mean(held):.1%}."] if held else []
    return "\n".join([*lines, "", *means])


def _read(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    read: dict[str, Any] = json.loads(gzip.decompress(data) if file.suffix == ".gz" else data)
    return read


def added_to(shipped: OperatorTable, table: OperatorTable) -> OperatorTable:
    """The shipped table with these timings; what it knows of nodes that send stays."""
    new = table.overheads
    overheads = replace(
        shipped.overheads,
        waits_for_loss=False,  # since then a loss is read during the next step
        nodes=new.nodes,
        seconds_step_nodes=new.seconds_step_nodes,
        seconds_replay=new.seconds_replay,
        seconds_replay_weight=new.seconds_replay_weight,
    )
    what = "under autocast to bfloat16, cudnn.benchmark on; stand-ins of fused kernels; the host's nodes and replays"
    about = {**shipped.about, "added": f"{table.about['date']}, torch {table.about['torch']}: {what}"}
    return replace(shipped.merged(table), overheads=overheads, about=about)


def joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one; what a later one measured counts, and operators of all.

    A compiled step keeps the host's part of its own run: the machines that were lent differ by a third in it.
    """
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        graphs = run["found"].get("graphs", {})
        for name, one in run["found"].items():
            if len(one) > 1:
                before = found.get(name, {})
                timings = [*before.get("timings", ()), *one.get("timings", ())]
                replays = {"replays": _replays(graphs)} if "compiled" in one and "parts" in graphs else {}
                found[name] = {**before, **one, **replays, "timings": timings}
    return {"about": runs[-1]["about"], "found": found}


def _rows(found: dict[str, Any], shipped: System, operators: OperatorTable) -> Iterator[Row]:
    bare = tuple(timing for timing in operators.timings if timing.op != TUNED)
    for name, case in CASES.items():
        runs = found.get(f"case {name}", {}) | found.get(f"steps {name}", {})
        if "seconds_measure" not in runs:
            continue
        plan = plan_of(case, case.create("meta"))
        for kind in (kind for kind in ("eager", "compiled") if kind in runs):
            program = program_of(replace(plan, compile=kind == "compiled"), case)
            tuned = _of_program(program, operators) if program.compile else []
            used = tuned if "parts" in runs[kind] else []  # runs that do not tell them are older than our own kernels
            timed = replace(operators, timings=(*bare, *used), overheads=_of_its_host(operators.overheads, runs))
            system = replace(shipped, operators=timed)
            yield Row(case, kind, runs[kind], predict_programs({0: program}, system, Assumptions()), tuned)


def _of_its_host(overheads: Overheads, runs: dict[str, Any]) -> Overheads:
    """With the times of replays on the machine that ran these steps, where it was measured."""
    if "replays" not in runs:
        return overheads
    fixed, each = runs["replays"]
    return replace(overheads, seconds_replay=fixed, seconds_replay_weight=each)


def _of_program(program: Program, operators: OperatorTable) -> list[Timing]:
    """The convolutions of a compiled program that our own kernels compute, or write for, on an H200."""
    table = shipped_table(DEVICE_NAME)
    return [] if table is None else list(tuned_timings(distinct_works([fused(program)]), table, operators))


def _tuned(rows: list[Row], operators: OperatorTable) -> list[Timing]:
    """Those of all rows that the table does not have yet."""
    known = {timing.call for timing in operators.timings}
    found = {timing.call: timing for row in rows for timing in row.tuned}
    return [timing for call, timing in found.items() if call not in known]


def table_of(measured: dict[str, Any]) -> OperatorTable:
    """The timings of a run."""
    found = measured["found"]
    rows = [row for one in found.values() for row in one.get("timings", ()) if not row[0].startswith(LEFT_OUT)]
    timings = [_timing(*row) for row in rows]
    host, about = found.get("host", {}), measured["about"]
    updates = {key: UpdateTiming(*values) for key, values in host.get("updates", {}).items()}
    return OperatorTable(about["device"], tuple(timings), updates, _overheads(found), about)


def _timing(call: str, dtype: str, inputs: list[list[int]], *numbers: Any) -> Timing:
    flops, moved, seconds, spread, host, active = numbers
    return Timing(call, dtype, tuple(map(tuple, inputs)), flops, moved, seconds, spread, host, active)


def _overheads(found: dict[str, Any]) -> Overheads:
    host, graphs = found.get("host", {}), found.get("graphs", {})
    nodes: dict[str, tuple[float, float]] = {}
    for suffix, name in (("", "plain"), (" amp", "amp")):
        kinds, _ = host.get(name, ({}, 0.0))
        nodes |= {f"{kind}{suffix}": (pair[0], pair[1]) for kind, pair in kinds.items()}
    fixed = max(0.0, host.get("amp", ({}, 0.0))[1])
    fixed_replay, each = _replays(graphs)
    return Overheads(
        nodes=nodes,
        seconds_step_nodes=fixed,
        seconds_replay=fixed_replay,
        seconds_replay_weight=each,
    )


def _replays(graphs: dict[str, Any]) -> tuple[float, float]:
    """The host's seconds for a compiled step but its update, which has timings of its own: fixed, and for each weight.

    The line of least squares through steps of several depths.
    """
    if "parts" not in graphs:
        return 0.0, 0.0
    seconds = [sum(parts[:-1]) for parts in graphs["parts"]]
    slope, fixed = statistics.linear_regression(graphs["weights"], seconds)
    return max(0.0, fixed), max(0.0, slope)
