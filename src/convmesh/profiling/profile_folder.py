"""Reads the profile in a run folder."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from convmesh.errors import RunError
from convmesh.profiling.rank_profile import FOLDER, RankProfile, file_of, load_profile
from convmesh.profiling.rank_times import TimedRun, timed_run
from convmesh.profiling.saved_prediction import SavedPrediction, load_prediction

_WARM_UP = 3


@dataclass(frozen=True)
class ProfiledRun:
    """What a run folder says of its profiled steps."""

    run: TimedRun
    prediction: SavedPrediction | None
    slowdown: float | None
    """The time of a profiled step relative to the run's other steps; None if there are none to compare with."""


def load_run(folder: Path) -> ProfiledRun:
    """The profile in a run folder; an error says how to make one."""
    if not file_of(folder, 0).exists():
        if not folder.is_dir():
            raise RunError(f"`run` (={str(folder)!r}) is not a folder; name the folder of a run, such as runs/digits.")
        raise RunError(
            f"`run` (={str(folder)!r}) has no profile; make one: `convmesh train RUN.TOML --run FOLDER --profile`."
        )
    profiles = _same_steps(folder)
    return ProfiledRun(timed_run(profiles), load_prediction(folder), _slowdown(folder, profiles[0]))


def _same_steps(folder: Path) -> list[RankProfile]:
    """The files of all ranks, without those left by an earlier profile on more ranks."""
    first = load_profile(file_of(folder, 0))
    if not first.steps:
        raise RunError(f"{folder / FOLDER} holds no step; train a few more: `--profile` takes them after a warm-up.")
    ranks = math.prod(first.mesh.values())
    missing = [rank for rank in range(ranks) if not file_of(folder, rank).exists()]
    if missing:
        raise RunError(f"{folder / FOLDER} lacks the files of ranks {missing} of {ranks}; profile the run again.")
    profiles = [first, *(load_profile(file_of(folder, rank)) for rank in range(1, ranks))]
    taken = [step.step for step in first.steps]
    odd = [p.rank for p in profiles if p.mesh != first.mesh or [step.step for step in p.steps] != taken]
    if odd:
        raise RunError(f"{folder / FOLDER}: the files of ranks {odd} are of another profile; profile the run again.")
    return profiles


def _slowdown(folder: Path, first: RankProfile) -> float | None:
    """The slowdown from the run's metrics, which list every step."""
    try:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        seconds = {line["step"]: line["seconds_step"] - line["seconds_data"] for line in lines}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    taken = {step.step for step in first.steps}
    profiled = [seconds[step] for step in taken if step in seconds]
    usual = [each for step, each in seconds.items() if step not in taken and step > _WARM_UP]
    return statistics.median(profiled) / statistics.median(usual) if len(usual) > 2 and profiled else None
