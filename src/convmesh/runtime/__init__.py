"""Running a lowered plan: the split network, its step, its state, its pipeline."""

from convmesh.runtime.build import parallelize
from convmesh.runtime.net import ParallelNet

__all__ = ["ParallelNet", "parallelize"]
