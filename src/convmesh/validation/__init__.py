"""The oracle against measured runs: anchors calibrate a series, the other runs are predicted."""

from convmesh.validation.anchors import Calibration
from convmesh.validation.code_habits import Practice, practice_of
from convmesh.validation.measured_run import MeasuredRun, Series
from convmesh.validation.paradl_figure import SHIPPED
from convmesh.validation.runs_file import read_runs
from convmesh.validation.score import PUBLISHED, Scored, Validation
from convmesh.validation.validating import validate

__all__ = [
    "PUBLISHED",
    "SHIPPED",
    "Calibration",
    "MeasuredRun",
    "Practice",
    "Scored",
    "Series",
    "Validation",
    "practice_of",
    "read_runs",
    "validate",
]
