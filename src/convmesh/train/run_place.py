"""The run folder seen from a rank: all ranks know where it is, the first one writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from convmesh.train.run_folder import RunFolder
from convmesh.train.shared_fate import together


@dataclass(frozen=True)
class RunPlace:
    """Where a run is; `writer` is there on the first rank only."""

    path: Path
    writer: RunFolder | None

    def close(self) -> None:
        """Let other runs have the folder."""
        if self.writer is not None:
            self.writer.close()


def open_place(path: str | Path, resume: bool) -> RunPlace:
    """Take a folder for a run; if that is refused, it is on every rank."""
    chosen, writer = Path(path), None
    with together():
        if dist.get_rank() == 0:
            writer = RunFolder(chosen, resume)
    return RunPlace(chosen, writer)
