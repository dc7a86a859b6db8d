"""What a plan costs on a cluster: time, memory, traffic and energy, from the program that the runtime executes."""

from convmesh.oracle.anomalies import Anomaly, find_anomalies
from convmesh.oracle.assumptions import Assumptions
from convmesh.oracle.estimate import Basis, Estimate
from convmesh.oracle.memory import Memory
from convmesh.oracle.prediction import Prediction, predict_programs
from convmesh.oracle.profile import Profile, TimedTransfer
from convmesh.oracle.timeline import Interval, Timeline

__all__ = [
    "Anomaly",
    "Assumptions",
    "Basis",
    "Estimate",
    "Interval",
    "Memory",
    "Prediction",
    "Profile",
    "TimedTransfer",
    "Timeline",
    "find_anomalies",
    "predict_programs",
]
