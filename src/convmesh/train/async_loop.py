"""The loop of one rank that trains alone and hands in its weights: `sync = "async"`.

A step is one batch of the loader per rank, whoever takes them, so that learning rates and epochs are those of
synchronous training. The first rank reports steps as it finishes them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from convmesh.asynchronous.async_weights import AsyncWeights
from convmesh.asynchronous.claims import Claims
from convmesh.data import Loader
from convmesh.train.late_loss import LateLoss
from convmesh.train.loop import Hook, Run
from convmesh.train.step_record import StepRecord


@dataclass
class AsyncLoop:
    """Called like the synchronous loop; makes this rank's part of the steps."""

    loader: Loader
    weights: AsyncWeights
    every: int
    """Batches between submissions of weights."""
    _losses: list[torch.Tensor] = field(default_factory=list)
    """Losses of the batches since weights were last handed in."""
    _loss: torch.Tensor = field(default_factory=lambda: torch.tensor(float("nan")))
    _told: float = 0.0
    _waited: float = 0.0

    def __call__(self, run: Run, hooks: Sequence[Hook]) -> None:
        try:
            self._train(run, hooks)
        except BaseException:
            self.weights.abandon()
            raise

    def _train(self, run: Run, hooks: Sequence[Hook]) -> None:
        claims = Claims(run.progress.step * run.accumulate, run.steps * run.accumulate)
        batches = self.loader.batches(divmod(number, run.steps_epoch * run.accumulate) for number in claims)
        self._told = time.perf_counter()
        with run.stopping.listening():
            for shards in batches:
                step = self._trained(run, claims, shards)
                # The last step is reported once all ranks have handed in their work.
                self._tell(run, hooks, min(step, run.steps - 1))
                if run.stopping.after_step():
                    claims.stop(run.stopping.signal)
                    break
        _close(batches)
        self._end(run, hooks, claims)

    def _trained(self, run: Run, claims: Claims, shards: Any) -> int:
        """Train on a batch; return how many steps are done with it."""
        step = claims.taken.popleft() // run.accumulate
        self._loss = run.stepper(step, [shards]).detach()
        self._losses.append(self._loss)
        # At the end of an epoch too, so that the first rank evaluates and saves what all ranks have made.
        if len(self._losses) >= self.every or (step + 1) % run.steps_epoch == 0:
            self._submit()
        return step + 1

    def _submit(self) -> None:
        if self._losses:
            self.weights.submit(torch.stack(self._losses).double().mean().item())
            self._losses = []

    def _tell(self, run: Run, hooks: Sequence[Hook], step: int) -> None:
        """Report each step that finished since the last report; several if other ranks were faster."""
        first, now, waited = run.progress.step, time.perf_counter(), self.loader.seconds_waiting_total
        if step <= first:
            return
        spent = (now - self._told) / (step - first), (waited - self._waited) / (step - first)
        for number in range(first, step):
            record = self._record(run, number, spent, now)
            for hook in hooks:
                hook.after_step(record)
        self._told, self._waited = time.perf_counter(), waited

    def _record(self, run: Run, number: int, spent: tuple[float, float], now: float) -> StepRecord:
        done, epoch = run.progress, number // run.steps_epoch + 1
        done.step = number + 1
        done.times.add(*spent)
        rate = run.stepper.rate(number)
        return StepRecord(number + 1, epoch, LateLoss(self._loss), *spent, run.samples_step, rate, now)

    def _end(self, run: Run, hooks: Sequence[Hook], claims: Claims) -> None:
        self._submit()
        self.weights.finish()
        run.stopping.signal = run.stopping.signal or claims.stopped_by
        if self.weights.weights is not None:
            late = self.weights.weights.staleness
            mean = sum(late) / len(late) if late else 0.0
            told = {"updates": len(late), "mean_staleness": mean}
            run.progress.extra |= {"mesh": {"data": run.accumulate}, "asynchronous": told}
        if not run.stopping.signal:
            self._tell(run, hooks, run.steps)


def _close(batches: Iterator[Any]) -> None:
    close: Any = getattr(batches, "close", None)
    if close is not None:
        close()
