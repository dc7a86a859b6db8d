"""Saves and loads a training run: in the background, in parallel, on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from convmesh.checkpoint.choosing import choose, together
from convmesh.checkpoint.gathering import content_of, head_of
from convmesh.checkpoint.report_board import ReportBoard
from convmesh.checkpoint.restoring import check_matches, restore
from convmesh.checkpoint.save_job import SaveJob, Target
from convmesh.checkpoint.snapshot import HostMemory, Snapshot
from convmesh.checkpoint.step_folders import paths_by_step
from convmesh.errors import CheckpointError, ConvMeshError
from convmesh.runtime import ParallelNet

State = dict[str, Any]


class Checkpointer:
    """Checkpoints of one run in a folder that all ranks see; call every method on all ranks.

    Each rank writes its share as safetensors. `load` puts it together on any mesh, plan or number of ranks. `keep` is
    the number of checkpoints to keep (None: all). With `asynchronous`, `save` returns at once: a thread copies the
    values (an optimiser's next update waits for the copy) and writes them; one save is in flight at a time. A save
    fails if a rank has not written after `seconds_timeout`.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int | None = 2,
        asynchronous: bool = True,
        *,
        seconds_timeout: float = 1800.0,
    ) -> None:
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise CheckpointError(f"`keep` (={keep!r}) must be a positive number of checkpoints, or None for all.")
        self.folder = Path(folder)
        self._keep, self._asynchronous, self._seconds = keep, asynchronous, seconds_timeout
        self._memory = HostMemory()
        self._job: SaveJob | None = None
        self.damaged: dict[int, str] = {}
        """Steps of checkpoints that `load` passed over, each with what is wrong."""

    def save(self, step: int, net: ParallelNet, optimizer: Optimizer | None = None, state: State | None = None) -> None:
        """Save weights, buffers, the optimiser, random numbers and `state` (the first rank's, as JSON).

        The values are those at the time of the call. If the previous save failed, its error is raised now, here and not
        in the background.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(f"`step` (={step!r}) must be a whole number from 0 on.")
        self.wait()
        board = ReportBoard(net.mesh, self._seconds)
        head, content = self._prepared(step, net, optimizer, state or {})
        target = Target(self.folder, step, self._keep, frozenset(self.damaged))
        self._job = SaveJob(target, net.mesh.rank, board, content, head)
        self.damaged.pop(step, None)
        if self._asynchronous:
            self._job.start()
        else:
            self._job.run()
        if not self._asynchronous or isinstance(content, str):
            self.wait()

    def _prepared(
        self, step: int, net: ParallelNet, optimizer: Optimizer | None, state: State
    ) -> tuple[dict[str, Any], Snapshot | str]:
        """What to write, or why that is impossible, which the other ranks must hear."""
        try:
            head = head_of(step, net, optimizer, state)
            return head, content_of(net, optimizer, self._memory)
        except ConvMeshError as error:
            return {}, str(error)

    def wait(self) -> None:
        """Return when the save in flight is on the disk; raise `CheckpointError` on every rank if it failed."""
        job, self._job = self._job, None
        if job is not None:
            job.finish()

    def load(self, net: ParallelNet, optimizer: Optimizer | None = None, step: int | None = None) -> State | None:
        """Load the newest checkpoint, or that of `step`, and return its `state`; None if there is none.

        Digests are checked first. A damaged newest checkpoint is skipped with a warning, the same on all ranks.
        """
        self.wait()
        reader, damaged = choose(self.folder, net.mesh, step)
        self.damaged |= damaged
        if reader is None:
            return None
        together(net.mesh, lambda: check_matches(reader.manifest, net, optimizer))
        together(net.mesh, lambda: restore(reader, net, optimizer))
        return dict(reader.manifest.state)

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in ascending order."""
        return list(paths_by_step(self.folder))
