"""How far a supervisor goes to keep a run alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from convmesh.supervise.slots import SECONDS_BACKOFF

SECONDS_START = 60.0
"""How long a supervisor waits at the start for places to meet at that come before its own."""


@dataclass(frozen=True)
class Policy:
    """What may be done about a failure."""

    ranks: int
    """Ranks on this host."""
    is_elastic: bool = True
    min_ranks: int = 1
    max_restarts: int = 3
    """Consecutive restarts without a new checkpoint."""
    seconds_timeout: float = 600.0
    seconds_backoff: float = SECONDS_BACKOFF
    seconds_host: float = 20.0
    """After this time a silent host counts as lost."""
    seconds_start: float = SECONDS_START


@dataclass(frozen=True)
class Job:
    """What the ranks run."""

    command: Sequence[str]
    folder: Path
    resume: bool = False

    def line(self, again: bool) -> list[str]:
        """The command of a rank; `again` resumes the run, or starts it if nothing was saved."""
        return [*self.command, *(["--resume"] if again or self.resume else [])]
