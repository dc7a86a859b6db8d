"""Learning rates as pure functions of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from convmesh.train.run_config import ScheduleConfig


@dataclass(frozen=True)
class Schedule:
    """The factor of the learning rate in each step."""

    config: ScheduleConfig
    steps_epoch: int
    steps_run: int
    """The planned length of the run; a run that stops earlier keeps the curve."""

    def __call__(self, step: int) -> float:
        """The factor for step `step`, counted from 0."""
        rise = self.config.warmup_epochs * self.steps_epoch
        warm = min(1.0, (step + 1) / rise) if rise >= 1 else 1.0
        length = self.config.epochs * self.steps_epoch or self.steps_run
        done = min(1.0, max(0.0, step - rise) / max(1.0, length - rise))
        return warm * _SHAPES[self.config.name](self, step, done)

    def _towards_final(self, left: float) -> float:
        return self.config.final + (1 - self.config.final) * left


def _constant(schedule: Schedule, step: int, done: float) -> float:
    del schedule, step, done
    return 1.0


def _cosine(schedule: Schedule, step: int, done: float) -> float:
    del step
    return schedule._towards_final((1 + math.cos(math.pi * done)) / 2)


def _polynomial(schedule: Schedule, step: int, done: float) -> float:
    del step
    return schedule._towards_final((1 - done) ** schedule.config.power)


def _step(schedule: Schedule, step: int, done: float) -> float:
    del done
    passed = sum(step >= milestone * schedule.steps_epoch for milestone in schedule.config.milestones)
    return schedule.config.gamma**passed


_SHAPES: dict[str, Callable[[Schedule, int, float], float]] = {
    "constant": _constant,
    "cosine": _cosine,
    "polynomial": _polynomial,
    "step": _step,
}
