"""Making plans: drafts, searches, mixes, predictions, scaling curves, explanations."""

from convmesh.planner.planning import plan
from convmesh.planner.predicting import predict
from convmesh.planner.searching import search

__all__ = ["plan", "predict", "search"]
