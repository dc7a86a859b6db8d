"""The end of a run on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def show(summary: Mapping[str, Any], folder: Path) -> None:
    """A few lines: what was reached, how fast, and where it is."""
    mesh = ", ".join(f"{axis} {size}" for axis, size in summary["mesh"].items())
    ended = f"stopped by signal {summary['stopped_by_signal']}, saved" if summary["stopped_by_signal"] else "done"
    lines = [
        f"{ended}: {_counted(summary['steps'], 'step')} on {_counted(summary['ranks'], 'rank')}"
        f"{f' ({mesh})' if mesh else ''} in {summary['seconds_total']:.1f} s",
        f"  final loss  {_number(summary['final_loss'])}",
        *(f"  test {name:10}  {_shown(value)}" for name, value in (summary["eval"] or {}).items()),
        *_speed(summary),
        *_reading(summary),
        f"  run folder  {folder}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _speed(summary: Mapping[str, Any]) -> Iterator[str]:
    """The time of a step, next to its prediction if there is one; nothing for a run that had no step left to make."""
    measured, predicted = summary["measured_seconds_step"], summary["predicted_seconds_step"]
    if measured is not None:
        beside = "" if predicted is None else f", {predicted * 1e3:.4g} ms predicted"
        yield f"  step  {measured * 1e3:.4g} ms measured{beside}; {summary['data_share']:.0%} waiting for data"


def _reading(summary: Mapping[str, Any]) -> Iterator[str]:
    """What was read from storage, or made, for generated samples, which are made whole."""
    if summary["bytes_read"]:
        ratio = summary["bytes_read"] / summary["bytes_needed"]
        yield f"  rank 0 read or made  {summary['bytes_read'] / 1e6:.4g} MB of samples, {ratio:.2f} x what it needed"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _shown(value: Any) -> str:
    return ", ".join(_number(each) for each in value) if isinstance(value, list) else _number(value)
