"""The run folder seen from a rank: all ranks know where it is, the first one writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from convmesh.train.run_folder import RunFolder
from convmesh.train.shared_fate import together


@dataclass(frozen=True)
class RunPlace:
    """Where a run is; only the first rank has a `writer`."""

    path: Path
    writer: RunFolder | None

    def close(self) -> None:
        """Release the folder to other runs."""
        if self.writer is not None:
            self.writer.close()


def open_place(path: str | Path, resume: bool) -> RunPlace:
    """Take a folder for a run; a refusal is raised on every rank."""
    chosen, writer = Path(path), None
    with together():
        if dist.get_rank() == 0:
            writer = RunFolder(chosen, resume)
    return RunPlace(chosen, writer)
