"""The training loop: a function of a run's parts and of hooks that are called after every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from convmesh.train.evaluation import Shards
from convmesh.train.late_loss import LateLoss
from convmesh.train.step_record import Progress, StepRecord
from convmesh.train.stepping import Stepper
from convmesh.train.stopping import Stopping


class Batches(Protocol):
    """This rank's shards of the batches of an epoch, from batch `start` on."""

    @property
    def seconds_waiting_total(self) -> float:
        """Seconds spent waiting for data so far."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Shards]: ...


class Hook(Protocol):
    """Called by the loop on every rank; a run's hooks are called in order."""

    def after_step(self, record: StepRecord) -> None: ...


@dataclass(frozen=True)
class Run:
    """The parts of a run, seen from one rank."""

    stepper: Stepper
    data: Batches
    steps: int
    """Steps of the whole run."""
    steps_epoch: int
    samples_step: int
    """Global batch of a step."""
    progress: Progress
    stopping: Stopping
    accumulate: int = 1
    around_step: Callable[[], AbstractContextManager[None]] = nullcontext
    """The context of every step, including its wait for data."""


def train(run: Run, hooks: Sequence[Hook] = ()) -> None:
    """Make steps until the run is complete or told to stop; `run.progress` says where it is."""
    done = run.progress
    with run.stopping.listening():
        while done.step < run.steps and not run.stopping.signal:
            _epoch(run, hooks)
        run.stopping.settle()


def _epoch(run: Run, hooks: Sequence[Hook]) -> None:
    """The rest of the current epoch, or of the run."""
    done = run.progress
    epoch, within = divmod(done.step, run.steps_epoch)
    batches = run.data.epoch(epoch, start=within * run.accumulate)
    try:
        for _ in range(min(run.steps_epoch - within, run.steps - done.step)):
            with run.around_step():
                record = _step(run, batches, epoch)
            for hook in hooks:
                hook.after_step(record)
            if run.stopping.after_step():
                break
    finally:
        close: Any = getattr(batches, "close", None)
        if close is not None:
            close()


def _step(run: Run, batches: Iterator[Shards], epoch: int) -> StepRecord:
    done, begin, waited = run.progress, time.perf_counter(), run.data.seconds_waiting_total
    rate = run.stepper.rate(done.step)
    parts = [next(batches) for _ in range(run.accumulate)]
    loss = LateLoss(run.stepper(done.step, parts))
    ended = time.perf_counter()
    seconds = ended - begin
    seconds_data = run.data.seconds_waiting_total - waited
    done.step += 1
    done.times.add(seconds, seconds_data)
    return StepRecord(done.step, epoch + 1, loss, seconds, seconds_data, run.samples_step, rate, ended)
