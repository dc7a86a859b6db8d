"""The cost of a plan on a cluster: time, memory, traffic and energy, from a recording of what each rank will run."""

from convmesh.oracle.anomalies import Anomaly, find_anomalies
from convmesh.oracle.memory.peak import Memory
from convmesh.oracle.prediction import Prediction, predict_programs
from convmesh.oracle.pricing.assumptions import Assumptions
from convmesh.oracle.pricing.estimate import Basis, Estimate
from convmesh.oracle.profile import Profile, TimedTransfer
from convmesh.oracle.simulate.timeline import Interval, Timeline

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
