"""The page of `benchmarks.balance`: a section for each number of ranks, made from a file of results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import put_section

PAGE = Path(__file__).parent / "balance.md"

Trial = dict[str, Any]


def put_on_page(found: dict[str, Any], is_written: bool = True) -> str:
    """The section of a file of results; replaces the one of the same number of ranks on the page."""
    text = section(found)
    if is_written:
        put_section(f"{found['ranks']} ranks", text, PAGE)
    return text


def section(found: dict[str, Any]) -> str:
    ranks = found["ranks"]
    head = f"{found['date']}, {found['machine']}, {ranks} ranks × 1 thread over Gloo; command: `{found['command']}`"
    tables = [_table(case) for case in found["cases"].values()]
    return "\n\n".join([f"## {ranks} ranks", head, *tables])


def _table(case: dict[str, Any]) -> str:
    trials = [trial for trial in case["trials"] if trial["balanced"]]
    if not trials:
        return f"### {case['title']}\n\nThe time was over before the slow-down."
    rows: list[tuple[str, Callable[[Trial], float], Callable[[Trial], float]]] = [
        ("first half: equal shares", lambda t: _mean(t["equal_before"]), _ideal_before),
        ("first half: balanced", lambda t: _mean(t["before"]), _ideal_before),
        ("second half: equal shares", lambda t: _mean(t["equal"]), ideal),
        ("second half: balanced, from the slow-down on", lambda t: _mean(t["balanced"]), ideal),
        ("second half: balanced, its last two thirds", lambda t: _mean(_late(t["balanced"])), ideal),
    ]
    lines = [
        "| | ms a step | ranks alone, summed | of that throughput | of the first half's, scaled |",
        "| --- | --- | --- | --- | --- |",
    ]
    for what, seconds, best in rows:
        times = [seconds(trial) for trial in trials]
        ideals = [best(trial) for trial in trials]
        scaled = [
            _mean(t["equal_before"] + t["before"]) * b / _ideal_before(t) for t, b in zip(trials, ideals, strict=True)
        ]
        columns = [_middle(times), _middle(ideals), _spread(ideals, times), _spread(scaled, times)]
        lines.append(f"| {what} | {' | '.join(columns)} |")
    steps = ", ".join(str(len(trial["balanced"])) for trial in trials)
    counts = f"Steps after the slow-down in {len(trials)} runs: {steps}"
    moves = [f"- {move}" for move in trials[0]["moves"]]
    return "\n".join([f"### {case['title']}", "", *lines, "", f"{counts}. Moves of the first:", "", *moves])


def ideal(trial: Trial) -> float:
    """Seconds of a step if ranks worked at the speed that each has alone, and nothing else took time."""
    turns = [1 / sum(rates) for rates in trial["alone"]]
    return _mean(turns)


def _ideal_before(trial: Trial) -> float:
    return 1 / sum(trial["alone_before"])


def _late(seconds: Sequence[float]) -> Sequence[float]:
    return seconds[len(seconds) // 3 :]


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds)


def _middle(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.0f}"


def _spread(ideals: Sequence[float], times: Sequence[float]) -> str:
    shares = [100 * best / seconds for best, seconds in zip(ideals, times, strict=True)]
    return f"{statistics.median(shares):.0f} % ({min(shares):.0f} to {max(shares):.0f})"
