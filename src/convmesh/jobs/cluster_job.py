"""A run on a cluster as a value: what to train, and on how much of the machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath


@dataclass(frozen=True)
class ClusterJob:
    """Every node runs the same number of ranks, each with its own GPU, or all without."""

    config: str
    """The run file, or package.module:function."""
    run: PurePath
    """The run folder, on a file system that all nodes see."""
    nodes: int = 1
    ranks: int = 8
    """Ranks on each node."""
    cores: int = 8
    """Processor cores of each rank."""
    has_gpus: bool = True

    @property
    def name(self) -> str:
        """A name that clusters allow: small letters, digits and hyphens, at most 40."""
        stem = self.config.rpartition(":")[2] if ":" in self.config else PurePath(self.config).stem
        return f"convmesh-{re.sub(r'[^a-z0-9]+', '-', stem.lower())}"[:40].strip("-")

    @property
    def command(self) -> list[str]:
        """The command of every rank. It resumes, so that a restarted job goes on."""
        return ["train", self.config, "--run", str(self.run), "--resume"]
