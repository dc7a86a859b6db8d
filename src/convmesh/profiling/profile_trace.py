"""The profiled steps as a trace for Perfetto and Chrome: one process per rank, and one for the predicted step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from convmesh.oracle.anomalies import Expected
from convmesh.oracle.simulate.timeline import Interval, joined
from convmesh.profiling.rank_times import MeasuredStep, TimedRun

Event = dict[str, Any]
_THREADS = ("compute", "communication", "waiting")


def trace_of(run: TimedRun, expected: Expected | None) -> dict[str, Any]:
    """The trace, ready for JSON; times are in microseconds from the start of the first profiled step."""
    origin = min(step.begin for step in run.steps[0].steps.values())
    events = [event for rank in run.ranks for event in _names(rank, f"rank {rank}")]
    events += [event for step in run.steps for rank in run.ranks for event in _events(step, rank, origin)]
    if expected is not None:
        begin = run.steps[0].steps[expected.parts.rank].begin - origin
        events += _predicted(run, expected, begin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(pid: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for number, thread in enumerate(_THREADS):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": number, "args": {"name": thread}}


def _events(step: MeasuredStep, rank: int, origin: float) -> Iterator[Event]:
    own = step.steps[rank]
    yield _event(f"step {own.step}", "step", rank, 0, own.begin - origin, own.end - origin, {})
    for span in own.spans:
        name = span.layer or span.phase
        yield _event(name, span.phase, rank, 0, span.begin - origin, span.end - origin, {"phase": span.phase})
    for match in step.matches[rank]:
        each = match.crossing
        told = {"phase": each.phase, "kind": each.carrier, "bytes": each.bytes_sent, "axes": "*".join(each.axes)}
        name = each.layer or each.phase or each.carrier
        yield _event(name, each.phase, rank, 1, match.begin - origin, match.end - origin, told)
        told |= {"idle ms": match.idle * 1e3, "exposed ms": match.exposed * 1e3, "last": f"rank {match.last}"}
        yield _event(name, each.phase, rank, 2, each.needed - origin, each.arrived - origin, told)


def _event(name: str, category: str, pid: int, tid: int, begin: float, end: float, args: Event) -> Event:
    return {
        "ph": "X", "name": name, "cat": category or "transfer", "pid": pid, "tid": tid, "ts": begin * 1e6,
        "dur": (end - begin) * 1e6, "args": args,
    }  # fmt: skip


def _predicted(run: TimedRun, expected: Expected, begin: float) -> Iterator[Event]:
    """The slowest predicted rank, drawn from where its first profiled step begins."""
    rank, pid = expected.parts.rank, run.mesh.size
    yield from _names(pid, f"predicted (rank {rank})")
    intervals: list[Interval] = [*joined([expected.parts.timeline.of(rank)]).intervals]
    for each in intervals:
        told = {"phase": each.phase, "kind": each.kind, "bytes": each.bytes_sent, "axes": "*".join(each.axes)}
        tid = 0 if each.stream == "compute" else 1
        yield _event(each.layer or each.phase, each.phase, pid, tid, begin + each.begin, begin + each.end, told)
