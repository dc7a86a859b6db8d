"""Finding plans: strategies on all meshes, splits layer by layer, and why the others are refused."""

from convmesh.oracle.search.candidates import Candidate, Candidates
from convmesh.oracle.search.objectives import Objective, objective
from convmesh.oracle.search.refusal import Refusal, RefusalKind
from convmesh.oracle.search.results import Ranked, Rejected, SearchResult, pareto
from convmesh.oracle.search.search import Search, SearchLimits

__all__ = [
    "Candidate",
    "Candidates",
    "Objective",
    "Ranked",
    "Refusal",
    "RefusalKind",
    "Rejected",
    "Search",
    "SearchLimits",
    "SearchResult",
    "objective",
    "pareto",
]  # fmt: skip
