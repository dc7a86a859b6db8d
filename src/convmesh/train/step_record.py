"""What is known of one step, and of a whole run."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from convmesh.train.late_loss import LateLoss

WARM_UP = 3
"""First steps of a process, which are slower than the rest: they do not count as measured."""


LATEST = 1000
"""Steps that count as the latest."""


@dataclass
class StepRecord:
    """One step; hooks that evaluate add to it."""

    step: int
    """Steps done, this one included."""
    epoch: int
    """The epoch of its samples, from 1."""
    loss: LateLoss
    seconds_step: float
    seconds_data: float
    """Of these, seconds spent waiting for data."""
    samples: int
    lr: float
    ended: float = 0.0
    """When it ended, by `time.perf_counter`."""
    eval: dict[str, Any] | None = None
    joules_step: float | None = None
    shares: dict[str, tuple[int, ...]] | None = None
    """Ranks' shares of each axis from the next batches on, if they changed after this step."""

    def to_plain(self) -> dict[str, Any]:
        """The line of metrics.jsonl."""
        line: dict[str, Any] = {
            "step": self.step,
            "epoch": self.epoch,
            "loss": self.loss.value,
            "seconds_step": self.seconds_step,
            "seconds_data": self.seconds_data,
            "samples_per_second": self.samples / self.seconds_step,
            "lr": self.lr,
        }
        if self.joules_step is not None:
            line["joules_step"] = self.joules_step
        if self.shares is not None:
            line["shares"] = self.shares
        return line if self.eval is None else line | {"eval": self.eval}


class StepTimes:
    """Durations of the latest steps, without the first few unless there are no others; older ones are dropped."""

    def __init__(self, *times: tuple[float, float]) -> None:
        self.steps = 0
        self._latest: deque[tuple[float, float]] = deque(maxlen=LATEST)
        for seconds, seconds_data in times:
            self.add(seconds, seconds_data)

    def add(self, seconds: float, seconds_data: float) -> None:
        """Add a step, with the time it spent waiting for data."""
        if self.steps == WARM_UP:
            self._latest.clear()
        self.steps += 1
        self._latest.append((seconds, seconds_data))

    @property
    def median(self) -> float | None:
        return statistics.median(seconds for seconds, _ in self._latest) if self._latest else None

    @property
    def data_share(self) -> float:
        total, data = (sum(column) for column in zip(*self._latest, strict=True)) if self._latest else (0.0, 0.0)
        return data / (total or 1.0)


@dataclass
class Progress:
    """Where a run is: what the loop counts, and hooks and the summary read."""

    step: int = 0
    """Steps done."""
    seconds_before: float = 0.0
    """Seconds of the processes before this one, which the run resumes."""
    final_loss: float | None = None
    eval: dict[str, Any] | None = None
    times: StepTimes = field(default_factory=StepTimes)
    """Of this process's steps."""
    joules: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """What the loop adds to the summary."""

    @property
    def is_warm(self) -> bool:
        """Whether this process has made steps that are typical of those to come."""
        return self.times.steps > WARM_UP

    @property
    def measured_seconds_step(self) -> float | None:
        """The median of the latest steps of this process, without its first few."""
        return self.times.median

    @property
    def data_share(self) -> float:
        """The fraction of the same steps that was spent waiting for data."""
        return self.times.data_share
