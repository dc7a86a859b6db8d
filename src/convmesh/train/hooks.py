"""What happens after a step, besides training: evaluation, metrics, TensorBoard, energy, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convmesh.balance.balancer import Balancer
from convmesh.errors import ConfigError
from convmesh.measure.energy_counters import EnergyMeter
from convmesh.supervise.following import ROOM
from convmesh.supervise.journal import Event, Journal
from convmesh.supervise.pulse import Phase, Pulse
from convmesh.train.run_folder import RunFolder
from convmesh.train.step_record import Progress, StepRecord
from convmesh.train.stopping import Stopping

SECONDS_ENERGY = 1.0
"""The counters of GPUs tick ten times a second."""


@dataclass(frozen=True)
class Every:
    """Due after a fixed number of steps or epochs, and after the last step."""

    steps: int
    """0 means never."""
    epochs: int
    steps_epoch: int
    last: int

    def is_due(self, step: int) -> bool:
        ends_epoch = self.epochs and step % (self.epochs * self.steps_epoch) == 0
        return bool(step == self.last or ends_epoch or (self.steps and step % self.steps == 0))


@dataclass(frozen=True)
class Evaluations:
    """Judges the network when it is due."""

    evaluate: Callable[[], dict[str, Any]]
    every: Every
    progress: Progress

    def after_step(self, record: StepRecord) -> None:
        if self.every.is_due(record.step):
            record.eval = self.progress.eval = self.evaluate()


@dataclass(frozen=True)
class Checkpoints:
    """Saves the state when it is due."""

    save: Callable[[], None]
    every: Every

    def after_step(self, record: StepRecord) -> None:
        if self.every.is_due(record.step):
            self.save()


@dataclass(frozen=True)
class Heartbeats:
    """Reports every step to the supervisor."""

    pulse: Pulse

    def after_step(self, record: StepRecord) -> None:
        self.pulse.beat(Phase.TRAINING, record.step)


@dataclass(frozen=True)
class RoomForMore:
    """Ends this generation of ranks at a checkpoint if the supervisor can start more of them."""

    pulse: Pulse
    saves: Every
    stopping: Stopping

    def after_step(self, record: StepRecord) -> None:
        if record.step == self.saves.last or not self.saves.is_due(record.step):
            return
        if self.pulse.is_asked_for_room:
            self.stopping.request(ROOM)
        self.stopping.ask_now()


@dataclass
class MovedShares:
    """Reports shares that moved: in the step's record, and in the first rank's journal."""

    balancer: Balancer
    journal: Journal | None
    _told: int = 0

    def after_step(self, record: StepRecord) -> None:
        for move in self.balancer.moves[self._told :]:
            record.shares = record.shares if move.refused else self.balancer.shares
            ranks = self.balancer.net.mesh.mesh.size
            if self.journal is not None:
                self.journal.add(Event("balanced", move.text, record.step, ranks, ranks))
        self._told = len(self.balancer.moves)


@dataclass
class Metrics:
    """Writes one line per step. The loss of a step on a GPU is read when the next one is queued."""

    folder: RunFolder
    progress: Progress
    _last: StepRecord | None = None

    def after_step(self, record: StepRecord) -> None:
        self.flush()
        self._last = record
        if record.eval is not None or record.loss.is_ready:
            self.flush()

    def flush(self) -> None:
        """Write the pending line."""
        if self._last is not None:
            self.folder.add_metrics(self._last.to_plain())
            self.progress.final_loss = self._last.loss.value
            self._last = None


@dataclass
class EnergyReadings:
    """Reads this host's energy counters about once a second and spreads the reading over the steps since."""

    meter: EnergyMeter
    progress: Progress
    _at: float = field(default_factory=time.monotonic)
    _before: list[float] = field(default_factory=list)
    _steps: int = 0

    def after_step(self, record: StepRecord) -> None:
        now = time.monotonic()
        if not self._before:
            self._at, self._before = now, self._read()
            return
        self._steps += 1
        if now - self._at >= SECONDS_ENERGY:
            after = self._read()
            pairs = zip(self.meter.counters, self._before, after, strict=True)
            used = sum(counter.between(begin, end) for counter, begin, end in pairs)
            record.joules_step = used / self._steps
            self.progress.joules = (self.progress.joules or 0.0) + used
            self._at, self._before, self._steps = now, after, 0

    def _read(self) -> list[float]:
        return [counter.joules() for counter in self.meter.counters]


def summary_writer() -> Any:
    """Torch's writer of TensorBoard's files, if the package is there."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "`tensorboard` (=True) needs the package tensorboard: `pip install 'convmesh[tensorboard]'`."
        ) from None
    return SummaryWriter


class TensorBoard:
    """Loss, learning rate, speed and evaluations as TensorBoard shows them."""

    def __init__(self, folder: Path) -> None:
        self._writer = summary_writer()(str(folder))

    def after_step(self, record: StepRecord) -> None:
        line = record.to_plain()
        for name in ("loss", "lr", "samples_per_second", "seconds_step"):
            self._writer.add_scalar(name, line[name], record.step)
        for name, value in (record.eval or {}).items():
            if isinstance(value, float):
                self._writer.add_scalar(f"eval/{name}", value, record.step)

    def close(self) -> None:
        self._writer.close()
