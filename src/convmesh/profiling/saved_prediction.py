"""The predicted step as a file in the run folder, so that a profile is compared with what was predicted at the time."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from convmesh.errors import RunError
from convmesh.layout.mesh import Mesh
from convmesh.oracle import Prediction
from convmesh.oracle.pricing.estimate import Estimate
from convmesh.oracle.simulate.step_times import Scheduled
from convmesh.oracle.simulate.timeline import Interval
from convmesh.profiling.rank_profile import FOLDER
from convmesh.system.saving import write_whole

PREDICTION = "prediction.json"
_PARTS = ("compute", "exposed", "hidden", "idle", "update")


@dataclass(frozen=True)
class SavedPrediction:
    """What `cm.find_anomalies` compares a profile with."""

    mesh: Mesh
    parts: Scheduled


def save_prediction(prediction: Prediction, run: Path) -> None:
    """Write the predicted parts and timeline of one step."""
    table: dict[str, Any] = {
        "mesh": dict(prediction.mesh.axes),
        "rank": prediction.parts.rank,
        "parts": {name: asdict(getattr(prediction.parts, name)) for name in _PARTS},
        "intervals": [asdict(interval) for interval in prediction.timeline.intervals],
    }
    path = run / FOLDER / PREDICTION
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(table) + "\n")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}.") from None


def forget_prediction(run: Path) -> None:
    """Remove an earlier profile's file."""
    (run / FOLDER / PREDICTION).unlink(missing_ok=True)


def load_prediction(run: Path) -> SavedPrediction | None:
    """The prediction of a profiled run; None if it had none."""
    path = run / FOLDER / PREDICTION
    if not path.exists():
        return None
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        intervals = [Interval(**{**each, "axes": tuple(each["axes"])}) for each in table["intervals"]]
        parts = {name: Estimate(**table["parts"][name]) for name in _PARTS}
        return SavedPrediction(
            Mesh(**table["mesh"]), Scheduled(**parts, rank=table["rank"], intervals=lambda: [intervals])
        )
    except (ValueError, KeyError, TypeError):
        raise RunError(f"{path} is not a saved prediction; make it again: `convmesh train --profile`.") from None
