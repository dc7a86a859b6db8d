"""Rivals in turn, each in a process of its own: compiled side by side, then measured one at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.remote_worker import RemoteWorker

ROUNDS = 7
SECONDS_READY = 90.0
SECONDS_BLOCK = 30.0
SECONDS_ROUNDS = 20.0
"""Kept for the rounds of a case: rivals that are not ready by then take no part."""


class Rivalling(RemoteWorker):
    """A rival's process, and what is known of it."""

    def __init__(self, case: str, name: str, logs: Path) -> None:
        self.case, self.name = case, name
        self.seconds: list[float] = []
        log = logs / f"{case} {name}.txt".replace(" ", "_")
        super().__init__("benchmarks.gpu_step.worker", [case, name], log)

    def summary(self) -> dict[str, Any]:
        if not self.seconds:
            return self.found
        many = self.seconds if len(self.seconds) > 1 else self.seconds * 2
        low, middle, high = statistics.quantiles(many, n=4)
        return {**self.found, "seconds": middle, "quartiles": [low, high], "rounds": len(self.seconds)}


def prepare_all(rivals: Sequence[Rivalling], seconds: float) -> None:
    """Let all of them make their models and compile at the same time."""
    end = time.monotonic() + seconds
    for rival in rivals:
        rival.send("prepare")
    for rival in rivals:
        rival.receive("prepare", end - time.monotonic(), limit=seconds)
        print(f"{rival.case}, {rival.name}: {rival.found}", flush=True)


def measure(rivals: Sequence[Rivalling], deadline: float) -> Iterator[None]:
    """Measure the rivals of one case in alternation; after each round there is something to keep."""
    for rival in rivals:
        reply = rival.ask("ready", min(SECONDS_READY, deadline - SECONDS_ROUNDS - time.monotonic()))
        print(f"{rival.case}, {rival.name}: {reply}", flush=True)
    yield
    ready = [rival for rival in rivals if "loss" in rival.found]
    for _ in range(ROUNDS):
        for rival in ready:
            _take_turn(rival, deadline)
        yield
    for command in ("energy", "profile"):
        for rival in ready:
            rival.ask(command, min(SECONDS_BLOCK, deadline - time.monotonic()))
        yield
    for rival in rivals:
        rival.end()


def _take_turn(rival: Rivalling, deadline: float) -> None:
    reply = rival.ask("time", min(SECONDS_BLOCK, deadline - time.monotonic()))
    if "seconds" in reply:
        rival.seconds.append(reply["seconds"])
