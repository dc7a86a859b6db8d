"""What a run shows while it trains: a bar on a terminal, else a quiet line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from convmesh.train.step_record import Progress, StepRecord

SECONDS_LINE, SECONDS_BAR = 10.0, 0.2
"""How often a line or the bar is written."""

LARGE_SHARE = 0.2
"""Once waiting for data takes this share of a step, it is named as the bottleneck."""


class ProgressLine:
    """Step time, samples/s, loss, time left, share of waiting for data, and the prediction next to the measurement."""

    def __init__(
        self, progress: Progress, steps: int, predicted: float | None, log: Callable[[str], None] | None = None
    ) -> None:
        self._progress, self._steps, self._predicted, self._log = progress, steps, predicted, log
        self._shown = 0.0
        self._bar = _bar(steps, progress.step) if sys.stderr.isatty() else None

    def after_step(self, record: StepRecord) -> None:
        now, due = time.monotonic(), SECONDS_BAR if self._bar is not None else SECONDS_LINE
        is_last = record.step == self._steps
        if now - self._shown < due and record.eval is None and not is_last:
            return
        self._shown = now
        text = self.text(record)
        if self._bar is not None:
            self._bar.update(0, completed=record.step, text=text, refresh=True)
        if self._bar is None or record.eval is not None:
            self.say(f"step {record.step}/{self._steps}  {text}{_judged(record.eval)}")

    def text(self, record: StepRecord) -> str:
        """The line for a step."""
        seconds = self._progress.measured_seconds_step or record.seconds_step
        share, is_warm = self._progress.data_share, self._progress.is_warm
        predicted = f" (predicted {_duration(self._predicted)})" if self._predicted else ""
        parts = [
            f"epoch {record.epoch}",
            f"loss {record.loss.value:.4g}",
            f"{_duration(seconds)}/step{predicted}",
            f"{record.samples / seconds:.4g} samples/s",
            f"data {share:.0%}{', the bottleneck' if is_warm and share > LARGE_SHARE else ''}",
        ]
        # The first steps read the first batches and choose kernels: they say nothing about the time left.
        left = [f"{_clock((self._steps - record.step) * seconds)} left"] if is_warm else []
        return "  ".join(parts + left)

    def say(self, text: str) -> None:
        """A line for people, and for log.txt."""
        if self._log is not None:
            self._log(text)
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            sys.stderr.write(text + "\n")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(steps: int, done: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column

    text = TextColumn("{task.fields[text]}", table_column=Column(no_wrap=False))  # in lines where terminals are narrow
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), text)
    # No refresh thread: it would compete with ranks for their cores.
    bar = RichProgress(*columns, console=Console(stderr=True), auto_refresh=False)
    bar.add_task("training", total=steps, completed=done, text="")
    bar.start()
    return bar


def _judged(results: dict[str, Any] | None) -> str:
    shown = {key: value for key, value in (results or {}).items() if isinstance(value, float)}
    return "  test " + "  ".join(f"{key} {value:.4g}" for key, value in shown.items()) if shown else ""


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
