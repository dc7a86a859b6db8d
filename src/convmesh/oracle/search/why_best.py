"""Why the best plan of a search is the best, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from convmesh.oracle.search.results import Ranked, SearchResult
from convmesh.oracle.simulate.timeline import Interval
from convmesh.plans.presets import AXES_OF

MUCH = 0.1
"""Share of a step above which the cause of waiting is reported."""

SIMPLE = ("data", "spatial", "filter", "channel", "pipeline")
"""Strategies that others combine."""


def why(result: SearchResult) -> list[str]:
    """Where the best plan spends its time, why the next strategy is slower, and what simpler ones lack."""
    best = result.best
    return [_spent(best), *_waited(best), *_against(result, best), *_simpler(result, best)]


def _spent(best: Ranked) -> str:
    parts = best.prediction.parts
    whole = parts.step.value or 1.0
    shares = {
        "computes": parts.compute.value + parts.update.value,
        "waits for transfers": parts.exposed.value,
        "is idle": parts.idle.value,
    }
    shown = ", ".join(f"{what} {value / whole:.0%}" for what, value in shares.items() if value >= 0.005 * whole)
    hidden = f"; {parts.hidden.value * 1e3:.3g} ms of transfers overlap that" if parts.hidden.value > 0 else ""
    return f"{best.strategy} {shown} of a step's {whole * 1e3:.4g} ms{hidden}"


def _waited(best: Ranked) -> list[str]:
    """The transfers that the best plan waits for most, if it waits long."""
    parts, timeline = best.prediction.parts, best.prediction.timeline
    if not timeline.intervals or parts.exposed.value < MUCH * parts.step.value:
        return []
    rank = parts.rank  # the one whose waits `parts` tells
    work = [*timeline.of(rank, "compute")]
    waits: dict[tuple[str, tuple[str, ...], bool], list[tuple[float, Interval]]] = {}
    for sent in timeline.of(rank, "communication"):
        key = sent.kind, sent.axes, sent.phase == "reduction"
        waits.setdefault(key, []).append((_bare(sent, work), sent))
    if not waits:  # it waits for messages that others send
        return []
    (kind, axes, sums), most = max(waits.items(), key=lambda item: sum(seconds for seconds, _ in item[1]))
    seconds, bytes_each = sum(s for s, _ in most), sum(i.bytes_sent for _, i in most) / len(most)
    where = "for gradient sums" if sums else f"in forward and backward, such as at {most[0][1].layer}"
    return [
        f"most of its waiting, {seconds * 1e3:.3g} ms, is for {len(most)} × {kind} along {'*'.join(axes)} {where}, "
        f"of {bytes_each / 1e6:.2g} MB each"
    ]


def _bare(sent: Interval, work: Sequence[Interval]) -> float:
    """Seconds of a transfer that no work overlaps."""
    begin, end = sent.begin, sent.end
    beside = [one for one in work if one.begin < end and one.end > begin]
    return sent.seconds - sum(min(end, one.end) - max(begin, one.begin) for one in beside)


def _against(result: SearchResult, best: Ranked) -> list[str]:
    other = next((r for r in result.plans if r.strategy != best.strategy), None)
    if other is None:
        return []
    mine, theirs = best.prediction.parts, other.prediction.parts
    names = ("compute", "exposed", "idle", "update")
    losses = {name: getattr(theirs, name).value - getattr(mine, name).value for name in names}
    most = max(losses, key=lambda name: losses[name])
    words = {"compute": "computation", "exposed": "exposed communication", "idle": "idle time", "update": "the update"}
    ratio = result.objective.of(other.prediction) / result.objective.of(best.prediction) - 1
    loss = f", most of all {losses[most] * 1e3:.3g} ms of {words[most]}" if losses[most] > 0 else ""
    return [
        f"the next strategy, {other.strategy} on {other.mesh}, needs {ratio:.1%} more {result.objective.name}{loss}"
    ]


def _simpler(result: SearchResult, best: Ranked) -> list[str]:
    """For each strategy on some of the best plan's axes alone: how much more it costs, or why it has no plan."""
    simple = [name for name in SIMPLE if {*AXES_OF[name]} & {*best.mesh.axes} and name != best.strategy]
    texts = {name: _alone(result, best, name) for name in simple}
    return [f"{strategy} alone {text}" for strategy, text in texts.items() if text]


def _alone(result: SearchResult, best: Ranked, strategy: str) -> str | None:
    cost = result.objective.of
    if ranked := next((r for r in result.plans if r.strategy == strategy), None):
        return f"needs {cost(ranked.prediction) / cost(best.prediction) - 1:.1%} more {result.objective.name}"
    refusal = next((one.refusal for one in result.rejected if one.strategy == strategy), None)
    if refusal is None:
        return None
    return f"has no plan: {refusal.rule if refusal.subject == strategy else refusal}"
