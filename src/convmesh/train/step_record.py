"""What is known of one step, and of a whole run."""

from __future__ import annotations

import statistics
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
    """Of the step, spent waiting for data."""
    samples: int
    lr: float
    ended: float = 0.0
    """When, by `time.perf_counter`."""
    eval: dict[str, Any] | None = None
    joules_step: float | None = None
    shares: dict[str, tuple[int, ...]] | None = None
    """What ranks have of each axis from the next batches on, if it changed after this step."""

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


@dataclass
class Progress:
    """Where a run is: what the loop counts, and hooks and the summary read."""

    step: int = 0
    """Steps done."""
    seconds_before: float = 0.0
    """Of the processes before this one, which the run resumes."""
    final_loss: float | None = None
    eval: dict[str, Any] | None = None
    seconds_steps: list[float] = field(default_factory=list)
    """Of this process."""
    seconds_data: list[float] = field(default_factory=list)
    """Of them, spent waiting for data."""
    joules: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """What the loop adds to the summary."""

    @property
    def is_warm(self) -> bool:
        """Whether this process has made steps that tell of those to come."""
        return len(self.seconds_steps) > WARM_UP

    @property
    def measured_seconds_step(self) -> float | None:
        """The median of the latest steps of this process, without its first few."""
        steady = _steady(self.seconds_steps)
        return statistics.median(steady) if steady else None

    @property
    def data_share(self) -> float:
        """The fraction of the same steps that was spent waiting for data."""
        return sum(_steady(self.seconds_data)) / (sum(_steady(self.seconds_steps)) or 1.0)


def _steady(seconds: list[float]) -> list[float]:
    """Of the latest steps; of a run that has only the first few, those."""
    return seconds[WARM_UP:][-LATEST:] or seconds
