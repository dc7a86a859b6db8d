"""Tools for testing split operators, ours and users' own."""

from convmesh.testing.case import SplitCase, natural_cut, opened
from convmesh.testing.compare import TOLERANCE, adjoint_error, assert_close, check_split
from convmesh.testing.ranks import RankError, RankPool, run_ranks

__all__ = [
    "TOLERANCE",
    "RankError",
    "RankPool",
    "SplitCase",
    "adjoint_error",
    "assert_close",
    "check_split",
    "natural_cut",
    "opened",
    "run_ranks",
]
