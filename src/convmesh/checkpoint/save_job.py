"""One save: this rank's file, and on the first rank the commit, in the background or at once."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convmesh.checkpoint.durable import make_folder, write_file
from convmesh.checkpoint.manifest import FileDigest
from convmesh.checkpoint.merging import file_name, merged
from convmesh.checkpoint.report_board import Report, ReportBoard
from convmesh.checkpoint.snapshot import Snapshot
from convmesh.checkpoint.step_folders import abandon, commit, incomplete, next_serial
from convmesh.errors import CheckpointError, UnwritableError


@dataclass(frozen=True)
class Target:
    """Where a save goes, and what it replaces."""

    folder: Path
    step: int
    keep: int | None
    damaged: frozenset[int]


class SaveJob:
    """Writes a snapshot; `outcome` is the same on all ranks: empty, or what went wrong."""

    def __init__(
        self, target: Target, rank: int, board: ReportBoard, content: Snapshot | str, head: dict[str, Any]
    ) -> None:
        self._target, self._rank, self._board = target, rank, board
        self._content, self._head = content, head
        self._outcome: Report = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write in the background."""
        self._thread = threading.Thread(target=self.run, name=f"checkpoint-{self._target.step}")
        self._thread.start()

    def finish(self) -> None:
        """Return when all ranks have finished; raise on all of them if one of them failed."""
        if self._thread is not None:
            self._thread.join()
        if problem := self._outcome.get("problem"):
            kind = UnwritableError if self._outcome.get("unwritable") else CheckpointError
            raise kind(f"checkpoint {self._target.step} in {self._target.folder} was not saved: {problem}")

    def run(self) -> None:
        """Write this rank's file and learn how the others did."""
        try:
            self._board.report(self._file_report())
            if self._rank:
                self._outcome = self._board.outcome()
            else:
                self._outcome = self._concluded()
                self._board.announce(self._outcome)
        except Exception as error:  # such as a lost store: training goes on, and hears of it at the next save
            self._outcome = {"problem": f"rank {self._rank}: {error}"}

    def _file_report(self) -> Report:
        if isinstance(self._content, str):
            return {"problem": f"rank {self._rank}: {self._content}"}
        path = incomplete(self._target.folder, self._target.step) / file_name(self._rank)
        digest = hashlib.sha256()
        try:
            self._content.late.make()  # in any case: an optimiser may be waiting for it
            make_folder(path.parent)
            size = write_file(path, self._content.chunks(), digest)
        except OSError as error:
            return {"problem": f"rank {self._rank} cannot write {path}: {error.strerror}.", "unwritable": True}
        except Exception as error:  # such as a failed copy from a GPU: without a report the others would wait
            return {"problem": f"rank {self._rank}: {error}"}
        return {"size": size, "sha256": digest.hexdigest()}

    def _concluded(self) -> Report:
        """On the first rank: commit what all ranks wrote, or free the space; the others hear of any error."""
        try:
            reports = self._board.reports()
            problems = [report["problem"] for report in reports if "problem" in report]
            unwritable = any("unwritable" in report for report in reports)
            if not problems:
                self._commit({file_name(rank): FileDigest(**report) for rank, report in enumerate(reports)})
                return {}
        except OSError as error:
            problems, unwritable = [f"the commit failed: {error.strerror} ({error.filename})."], True
        except Exception as error:
            problems, unwritable = [str(error)], False
        with contextlib.suppress(OSError):
            abandon(self._target.folder, self._target.step)
        return {"problem": " ".join(problems[:4]), **({"unwritable": True} if unwritable else {})}

    def _commit(self, files: dict[str, FileDigest]) -> None:
        target = self._target
        head = {**self._head, "serial": next_serial(target.folder)}
        manifest = merged(incomplete(target.folder, target.step), files, head)
        commit(target.folder, manifest, target.keep, set(target.damaged))
