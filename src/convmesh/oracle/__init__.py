"""What a plan costs on a cluster: time, memory, traffic and energy, from the program that the runtime executes."""

from convmesh.oracle.assumptions import Assumptions
from convmesh.oracle.estimate import Basis, Estimate
from convmesh.oracle.memory import Memory
from convmesh.oracle.prediction import Prediction, predict_programs

__all__ = ["Assumptions", "Basis", "Estimate", "Memory", "Prediction", "predict_programs"]
