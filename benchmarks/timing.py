"""Interleaved timing of rivals in one process group: medians and spread of the slowest rank."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

Step = Callable[[], object]


def interleave(steps: dict[str, Step], repeats: int, warmups: int = 2) -> dict[str, list[float]]:
    """Seconds of every rival's step; rivals take turns, so that machine drift affects all equally."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(warmups + repeats):
        for name, step in steps.items():
            elapsed = _timed(step)
            if round_ >= warmups:
                seconds[name].append(elapsed)
    return seconds


def _timed(step: Step) -> float:
    dist.barrier()
    begin = time.perf_counter()
    step()
    spent = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item()


def table(seconds: dict[str, list[float]], baseline: str) -> str:
    """Medians, quartiles and ratios to `baseline` as Markdown; ratios are medians of paired rounds."""
    rows = ["| rival | median ms | quartiles ms | faster than " + baseline + " |", "| --- | --- | --- | --- |"]
    for name, times in seconds.items():
        low, middle, high = (1e3 * q for q in statistics.quantiles(times, n=4))
        ratio = statistics.median(b / f for b, f in zip(seconds[baseline], times, strict=True))
        rows.append(f"| {name} | {middle:.2f} | {low:.2f} to {high:.2f} | {ratio:.2f}× |")
    return "\n".join(rows)


def machine() -> str:
    """The machine and versions, for the head of a page."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{len(names)} × {names[0] if names else platform.processor()}, torch {torch.__version__}"
