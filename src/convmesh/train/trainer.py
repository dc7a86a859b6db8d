"""`cm.Trainer`: the loop of `convmesh train` for those who write Python, over the same parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from convmesh.balance.balancer import Balancer
from convmesh.checkpoint import Checkpointer
from convmesh.data import Loader
from convmesh.measure.energy_counters import energy_meter
from convmesh.runtime import ParallelNet
from convmesh.supervise.journal import Journal
from convmesh.supervise.pulse import SECONDS_SAVING, Phase, pulse
from convmesh.train.evaluation import evaluate
from convmesh.train.hooks import (
    Checkpoints,
    EnergyReadings,
    Evaluations,
    Every,
    Heartbeats,
    Metrics,
    MovedShares,
    RoomForMore,
    TensorBoard,
)
from convmesh.train.loop import Hook, Run, train
from convmesh.train.progress_line import ProgressLine
from convmesh.train.run_folder import SUMMARY, checkpoints_of
from convmesh.train.run_place import RunPlace, open_place
from convmesh.train.shared_fate import shared_fate
from convmesh.train.step_record import Progress
from convmesh.train.stepping import Stepper
from convmesh.train.stopping import Stopping


@dataclass(frozen=True)
class Intervals:
    """How often a run is evaluated and saved; 0 means never. Both also happen after the last step."""

    evaluate_epochs: int = 1
    evaluate_steps: int = 0
    save_epochs: int = 1
    save_steps: int = 0


class Trainer:
    """Trains a parallelized network. Make it and call its methods on every rank.

    `loader` and `test` give batches (`cm.data.Loader`); `loss` and `metrics` are for tests. `schedule(step)` is the
    factor of the learning rate. With `folder`, metrics, log, checkpoints and a summary go there, and a run that is
    already there continues if `resume` is true. `accumulate` batches of the loader make a step. A `balancer` of the
    same network moves samples and space to the faster ranks while it trains.
    """

    def __init__(
        self,
        net: ParallelNet,
        optimizer: Optimizer,
        loader: Loader,
        *,
        test: Loader | None = None,
        loss: Callable[..., Any] | None = None,
        metrics: Sequence[str] = (),
        schedule: Callable[[int], float] | None = None,
        precision: str = "fp32",
        accumulate: int = 1,
        clip_norm: float = 0.0,
        seed: int = 0,
        folder: str | Path | RunPlace | None = None,
        resume: bool = False,
        keep: int = 2,
        asynchronous: bool = True,
        tensorboard: bool = False,
        predicted_seconds_step: float | None = None,
        balancer: Balancer | None = None,
    ) -> None:
        self.net, self.optimizer, self.loader, self.test = net, optimizer, loader, test
        self.loss, self.metrics, self.accumulate = loss, tuple(metrics), accumulate
        self.predicted_seconds_step, self.balancer = predicted_seconds_step, balancer
        self.progress = Progress()
        self.stopping = Stopping(net.mesh)
        self.stepper = Stepper(
            net, optimizer, factor=schedule, precision=precision, clip_norm=clip_norm, seed=seed
        )  # fmt: skip
        place = open_place(folder, resume) if isinstance(folder, str | Path) else folder
        self.folder = None if place is None else place.writer
        self._is_guest = place is not None and place.writer is None and net.mesh.rank == 0
        """Whether this rank trains its own network, and another one reports on the run."""
        self.journal = None if place is None else Journal(place.path)
        self.checkpointer = None if place is None else Checkpointer(checkpoints_of(place.path), keep, asynchronous)
        self._tensorboard = place.path / "tensorboard" if place is not None and tensorboard else None
        self._saved = -1
        self._began = time.monotonic()
        resumed = resume and self.resume()
        if self.folder is not None:
            damaged = () if self.checkpointer is None else self.checkpointer.damaged.values()
            self.folder.start(resumed, self.progress.step, self.ranks, damaged)

    def close(self) -> None:
        """Release the folder to other runs; the end of the process does so too."""
        if self.folder is not None:
            self.folder.close()

    @property
    def steps_epoch(self) -> int:
        """Steps in one epoch."""
        return len(self.loader) // self.accumulate

    @property
    def ranks(self) -> int:
        """Ranks of the run, also where each of them trains its own network."""
        return self.net.mesh.mesh.size if self.net.mesh.mesh.size > 1 else dist.get_world_size()

    def resume(self) -> bool:
        """Go on from the newest checkpoint, if there is one."""
        state = None if self.checkpointer is None else self.checkpointer.load(self.net, self.optimizer)
        if state is None:
            return False
        done = self.progress
        done.step, done.seconds_before = state["step"], state["seconds_total"]
        done.final_loss, done.eval = state["final_loss"], state["eval"]
        if self.stepper.scaler is not None and state["scaler"]:
            self.stepper.scaler.load_state_dict(state["scaler"])
        self._saved = done.step
        return True

    def save(self) -> None:
        """Save the state as a checkpoint of the current step."""
        if self.checkpointer is not None and not self._is_guest:
            with pulse().doing(Phase.SAVING, SECONDS_SAVING):
                self.checkpointer.save(self.progress.step, self.net, self.optimizer, self._state())
            self._saved = self.progress.step

    def _state(self) -> dict[str, Any]:
        """Everything a run resumes from besides weights and optimiser: order and schedule follow from the step."""
        done, scaler = self.progress, self.stepper.scaler
        return {
            "step": done.step,
            "seconds_total": self.seconds_total,
            "final_loss": done.final_loss,
            "eval": done.eval,
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    @property
    def seconds_total(self) -> float:
        """Seconds of the run so far, with the processes that it resumes."""
        return self.progress.seconds_before + time.monotonic() - self._began

    def evaluate(self, loader: Loader | None = None) -> dict[str, Any]:
        """Loss and metrics over all samples of `loader` (default: `test`), the same on every rank."""
        chosen = loader or self.test
        assert chosen is not None
        with self.stepper.autocast(), pulse().doing(Phase.EVALUATING):
            return evaluate(self.net, self.loss, pulse().over(chosen.epoch(0)), self.metrics)

    def fit(
        self,
        *,
        epochs: int = 0,
        steps: int = 0,
        intervals: Intervals | None = None,
        hooks: Sequence[Hook] = (),
        loop: Callable[[Run, Sequence[Hook]], None] = train,
    ) -> dict[str, Any]:
        """Train until the given epochs or steps are done, counted from the run's beginning; return the summary.

        Ctrl-C and SIGTERM end it early, saved; `trainer.stopping.signal` says which. `hooks` are called after every
        step; `loop` makes the steps.
        """
        last = steps or epochs * self.steps_epoch
        run = Run(
            self.stepper, self.loader, last, self.steps_epoch, self.accumulate * self.loader.order.batch_size,
            self.progress, self.stopping, self.accumulate, self.balancer.step if self.balancer else nullcontext,
        )  # fmt: skip
        own = self._hooks(last, intervals or Intervals())
        if self.folder is not None:
            self.folder.start_metrics(self.progress.step)
        pulse().begin(self.progress.step)
        try:
            with shared_fate():
                loop(run, [*own, *hooks])
                self._finish(own)
        finally:
            for hook in own:
                if isinstance(hook, ProgressLine | TensorBoard):
                    hook.close()
        return self.summary()

    def _finish(self, hooks: Sequence[Hook]) -> None:
        for hook in hooks:
            if isinstance(hook, Metrics):
                hook.flush()
        if self.checkpointer is not None:
            if self._saved != self.progress.step:
                self.save()
            with pulse().doing(Phase.SAVING, SECONDS_SAVING):
                self.checkpointer.wait()
        if self.folder is not None:
            self.folder.write_json(SUMMARY, self.summary())

    def _hooks(self, last: int, intervals: Intervals) -> list[Hook]:
        """In the order in which they run: a step's line has its evaluation, and a checkpoint comes last."""
        hooks: list[Hook] = [Heartbeats(pulse())] if pulse().is_watched else []
        if self._is_guest:
            return hooks
        if self.balancer is not None:
            hooks.append(MovedShares(self.balancer, None if self.folder is None else self.folder.journal))
        if self.test is not None:
            every = Every(intervals.evaluate_steps, intervals.evaluate_epochs, self.steps_epoch, last)
            hooks.append(Evaluations(self.evaluate, every, self.progress))
        if self.net.mesh.rank == 0:
            hooks += self._hooks_of_first_rank(last)
        if self.checkpointer is not None:
            saves = Every(intervals.save_steps, intervals.save_epochs, self.steps_epoch, last)
            hooks.append(Checkpoints(self.save, saves))
            if pulse().is_watched:
                hooks.append(RoomForMore(pulse(), saves, self.stopping))
        return hooks

    def _hooks_of_first_rank(self, last: int) -> list[Hook]:
        hooks: list[Hook] = []
        if (meter := energy_meter()).counters:
            hooks.append(EnergyReadings(meter, self.progress))
        if self.folder is not None:
            hooks.append(Metrics(self.folder, self.progress))
        if self._tensorboard is not None:
            hooks.append(TensorBoard(self._tensorboard))
        log = None if self.folder is None else self.folder.log
        hooks.append(ProgressLine(self.progress, last, self.predicted_seconds_step, log))
        return hooks

    def summary(self) -> dict[str, Any]:
        """What summary.json holds."""
        done, mesh = self.progress, self.net.mesh.mesh
        measured = done.measured_seconds_step
        summary: dict[str, Any] = {
            "steps": done.step,
            "final_loss": done.final_loss,
            "eval": done.eval,
            "seconds_total": self.seconds_total,
            "ranks": self.ranks,
            "mesh": dict(mesh.axes),
            "restarts": 0 if self.journal is None else self.journal.restarts(),
            "events": [] if self.journal is None else self.journal.events(),
            "predicted_seconds_step": self.predicted_seconds_step,
            "measured_seconds_step": measured,
            "data_share": done.data_share,
            "bytes_read": self.loader.bytes_read,
            "bytes_needed": self.loader.bytes_needed,
            "stopped_by_signal": self.stopping.signal or None,
        }
        if self.balancer is not None:
            moves = [move for move in self.balancer.moves if not move.refused]
            summary["balance"] = {"moves": len(moves), "shares": self.balancer.shares}
        summary |= done.extra
        if done.joules is not None and done.times.steps:
            summary["joules_step"] = done.joules / done.times.steps
        return summary if done.times.steps or self.folder is None else summary | self.folder.speed(done.step)
