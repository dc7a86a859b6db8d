"""Trains one network with many batch sizes on several numbers of ranks: accuracy and time of each run.

Each pair is a run of `convmesh train` with its own folder, so a stopped sweep resumes where it stopped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convmesh.errors import RunError

SUMMARY, LOG = "summary.json", "output.txt"


@dataclass(frozen=True)
class SweepPoint:
    """A finished run of the sweep."""

    batch: int
    ranks: int
    epochs: float
    accuracy: float
    seconds_total: float
    seconds_step: float
    samples_per_second: float


@dataclass(frozen=True)
class BatchSweep:
    """Which runs to make, and where."""

    config: Path
    folder: Path
    batches: tuple[int, ...]
    ranks: tuple[int, ...]
    flags: tuple[str, ...] = ()
    """More flags of `convmesh train`, for every run."""

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(ranks, batch) in the order they run."""
        return [(ranks, batch) for ranks in self.ranks for batch in self.batches]

    def points(self, report: Callable[[str], None]) -> Iterator[SweepPoint]:
        """Every run's result as it finishes; results already in the folder come at once."""
        for number, (ranks, batch) in enumerate(self.runs):
            report(f"run {number + 1} of {len(self.runs)}: batch {batch} on {ranks} ranks")
            yield self._point(ranks, batch)

    def _point(self, ranks: int, batch: int) -> SweepPoint:
        run = self.folder / f"ranks-{ranks}-batch-{batch}"
        if not _is_done(run):
            self._train(run, ranks, batch)
        return _read(run, ranks, batch)

    def _train(self, run: Path, ranks: int, batch: int) -> None:
        run.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "convmesh", "train", str(self.config), "--run", str(run), "--resume"]
        command += ["--ranks", str(ranks), "--batch", str(batch), *self.flags]
        with (run / LOG).open("w", encoding="utf-8") as log:
            status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False).returncode
        if status:
            raise RunError(f"batch {batch} on {ranks} ranks ended with status {status}: {_last_line(run / LOG)}")


def _is_done(run: Path) -> bool:
    """Whether a run was completed; an interrupted one is saved and resumes."""
    path = run / SUMMARY
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["stopped_by_signal"] is None


def _read(run: Path, ranks: int, batch: int) -> SweepPoint:
    summary: dict[str, Any] = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    accuracy = (summary["eval"] or {}).get("accuracy")
    if accuracy is None:
        raise RunError(f"{run}: the run has no test accuracy; sweep a run file with class labels and a test set.")
    seconds = summary["measured_seconds_step"]
    epochs = json.loads(lines[-1])["epoch"]
    return SweepPoint(batch, ranks, epochs, accuracy, summary["seconds_total"], seconds, batch / seconds)


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def best(points: Sequence[SweepPoint]) -> SweepPoint:
    """The most accurate one; among equals, the fastest."""
    return max(points, key=lambda point: (point.accuracy, -point.seconds_total))
