"""The run folder, whose files other tools read: one writer, atomic writes, never shared by two runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from convmesh.errors import RunError, UnwritableError
from convmesh.supervise.folder_lock import FolderInUseError, lock_folder
from convmesh.supervise.journal import EVENTS, Journal
from convmesh.system.saving import write_whole

METRICS, SUMMARY = "metrics.jsonl", "summary.json"

SPEED = (
    "ranks",
    "mesh",
    "predicted_seconds_step",
    "measured_seconds_step",
    "data_share",
    "bytes_read",
    "bytes_needed",
    "joules_step",
)
"""Figures of a summary that say nothing of a process without a step."""


class RunFolder:
    """`FOLDER` of a run, held by its first rank until `close`."""

    def __init__(self, path: Path, resume: bool) -> None:
        self.path = path
        self._metrics: IO[str] | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(path)
            with closed_on_error(self._lock):
                if not resume:
                    _check_is_new(path)
                self.journal = Journal(path)
        except OSError as error:
            rule = "it is a file; name a folder" if isinstance(error, FileExistsError) else error.strerror
            raise RunError(f"`run` (={str(path)!r}): {rule}.") from None

    @property
    def checkpoints(self) -> Path:
        return checkpoints_of(self.path)

    def write(self, name: str, text: str) -> None:
        """Replace a file, whole or not at all."""
        with self._told(name):
            write_whole(self.path / name, text)

    def read(self, name: str) -> str:
        """The text of a file that an earlier process of this run wrote; nothing if there is none."""
        with suppress(OSError, UnicodeDecodeError):
            return (self.path / name).read_text(encoding="utf-8")
        return ""

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self.write(name, json.dumps(value, indent=2, default=str) + "\n")

    def speed(self, step: int) -> dict[str, Any]:
        """What an earlier process of this run measured and wrote to summary.json after step `step`, its last."""
        try:
            told = json.loads(self.read(SUMMARY))
            return {name: told[name] for name in SPEED if name in told} if told["steps"] == step else {}
        except (ValueError, KeyError, TypeError):
            return {}

    def start_metrics(self, steps: int) -> None:
        """Go on after step `steps`: lines of later steps, which were not saved, are dropped."""
        file = self.path / METRICS
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        kept = [line for line in lines if 0 < _step_of(line) <= steps]
        if kept != lines:
            self.write(METRICS, "".join(line + "\n" for line in kept))
        with self._told(METRICS):
            self._metrics = file.open("a", encoding="utf-8", buffering=1)

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """One more line of metrics.jsonl."""
        assert self._metrics is not None
        with self._told(METRICS):
            self._metrics.write(json.dumps(record) + "\n")

    def log(self, text: str) -> None:
        """One more line of log.txt, with the time."""
        with self._told("log.txt"):
            self.journal.log(text)

    def start(self, resumed: bool, step: int, ranks: int, notes: Iterable[str] = ()) -> None:
        """Note that the ranks begin to train."""
        with self._told(EVENTS):
            self.journal.start(resumed, step, ranks, notes)

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """A full disk ends the run with a message; its checkpoints stay."""
        try:
            yield
        except OSError as error:
            told = f"{self.path / name} cannot be written: {error.strerror}; `--resume` goes on."
            raise UnwritableError(told) from None

    def close(self) -> None:
        """Release the folder."""
        for file in (self._metrics, self._lock):
            if file is not None:
                with suppress(OSError):  # of a full disk, already reported
                    file.close()


@contextmanager
def closed_on_error(file: IO[str]) -> Iterator[None]:
    """Close a file if the block fails."""
    try:
        yield
    except BaseException:
        file.close()
        raise


def checkpoints_of(run: Path) -> Path:
    """Where the checkpoints of a run are."""
    return run / "checkpoints"


def _locked(path: Path) -> IO[str]:
    try:
        return lock_folder(path)
    except FolderInUseError as error:
        raise RunError(
            f"`run` (={str(path)!r}) is in use by {error}; wait until that run has ended, or name another folder."
        ) from None


def _check_is_new(path: Path) -> None:
    if (path / METRICS).exists() or any(checkpoints_of(path).glob("*")):
        raise RunError(
            f"`run` (={str(path)!r}) holds an earlier run; go on with it by `--resume`, or name another folder."
        )


def _step_of(line: str) -> int:
    """The step of a line of metrics; 0 for a line that a crash cut off."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0
