"""What one rank measured, as the file it leaves in the run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from convmesh.errors import RunError
from convmesh.system.saving import write_whole

FOLDER = "profile"


@dataclass(frozen=True, slots=True)
class LayerTime:
    """A layer's forward or backward, or the update, from its begin to its end."""

    layer: str
    phase: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """One transfer: when it was posted, needed by the rank, and received."""

    layer: str
    phase: str
    carrier: str
    axes: tuple[str, ...]
    bytes_sent: int
    posted: float
    needed: float
    arrived: float
    done: float | None = None
    """When it was complete, if torch says so; possibly long before it was needed."""
    message: str = ""
    """The name of a message between stages, the same at both ends."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step of one rank."""

    step: int
    begin: float
    end: float
    seconds_data: float
    spans: tuple[LayerTime, ...]
    crossings: tuple[TransferTimes, ...]


@dataclass(frozen=True)
class RankProfile:
    """All profiled steps of one rank. Times are by its host's clock; `origin` is one moment, the same on all ranks."""

    rank: int
    mesh: Mapping[str, int]
    host: str
    origin: float
    accumulate: int
    by_layer: bool
    """Whether layers were timed one by one; a compiled step runs several together, and their names are joined."""
    steps: tuple[TimedStep, ...]


def file_of(run: Path, rank: int) -> Path:
    return run / FOLDER / f"rank_{rank:05}.json"


def save_profile(profile: RankProfile, run: Path) -> None:
    """Write a rank's file, whole or not at all."""
    path = file_of(run, profile.rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(profile)) + "\n")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}.") from None


def load_profile(path: Path) -> RankProfile:
    """Read a rank's file."""
    try:
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        steps = tuple(_step(step) for step in table.pop("steps"))
        return RankProfile(steps=steps, **table)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RunError(f"{path} is not a rank's profile; make it again: `convmesh train --profile`.") from None


def _step(table: dict[str, Any]) -> TimedStep:
    spans = tuple(LayerTime(**span) for span in table.pop("spans"))
    crossings = tuple(TransferTimes(**{**each, "axes": tuple(each["axes"])}) for each in table.pop("crossings"))
    return TimedStep(spans=spans, crossings=crossings, **table)
