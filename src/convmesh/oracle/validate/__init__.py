"""The oracle against measured runs: anchors calibrate a series, the other runs are predicted."""

from convmesh.oracle.validate.calibration import Calibration
from convmesh.oracle.validate.figures import SHIPPED
from convmesh.oracle.validate.practice import Practice, practice_of
from convmesh.oracle.validate.reading import read_runs
from convmesh.oracle.validate.runs import Run, Series
from convmesh.oracle.validate.score import PUBLISHED, Scored, Validation
from convmesh.oracle.validate.validate import validate

__all__ = [
    "PUBLISHED",
    "SHIPPED",
    "Calibration",
    "Practice",
    "Run",
    "Scored",
    "Series",
    "Validation",
    "practice_of",
    "read_runs",
    "validate",
]
