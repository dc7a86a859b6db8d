"""The end of a run on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def show(summary: Mapping[str, Any], folder: Path) -> None:
    """A few lines: what was reached, how fast, and where it is."""
    mesh = ", ".join(f"{axis} {size}" for axis, size in summary["mesh"].items()) or "one rank"
    ended = f"stopped by signal {summary['stopped_by_signal']}, saved" if summary["stopped_by_signal"] else "done"
    lines = [
        f"{ended}: {summary['steps']} steps on {summary['ranks']} ranks ({mesh}) in {summary['seconds_total']:.1f} s",
        f"  final loss  {_number(summary['final_loss'])}",
        *(f"  test {name:10}  {_shown(value)}" for name, value in (summary["eval"] or {}).items()),
        f"  step  {_milliseconds(summary['measured_seconds_step'])} measured, "
        f"{_milliseconds(summary['predicted_seconds_step'])} predicted; {summary['data_share']:.0%} waiting for data",
        *_reading(summary),
        f"  run folder  {folder}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def _reading(summary: Mapping[str, Any]) -> Iterator[str]:
    """What left the storage; generated samples and those in memory have none."""
    if summary["bytes_read"]:
        ratio = summary["bytes_read"] / summary["bytes_needed"]
        yield f"  rank 0 read  {summary['bytes_read'] / 1e6:.4g} MB of training data, {ratio:.2f} x what it needed"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _shown(value: Any) -> str:
    return ", ".join(_number(each) for each in value) if isinstance(value, list) else _number(value)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.4g} ms"
