"""Finding plans: strategies over all meshes, splits layer by layer, and why what is not found cannot be."""

from convmesh.oracle.search.candidates import Candidate, Candidates
from convmesh.oracle.search.engine import Limits, Search
from convmesh.oracle.search.found import Found, Ranked, Rejected, pareto
from convmesh.oracle.search.objectives import Objective, objective

__all__ = [
    "Candidate", "Candidates", "Found", "Limits", "Objective", "Ranked", "Rejected", "Search", "objective", "pareto",
]  # fmt: skip
