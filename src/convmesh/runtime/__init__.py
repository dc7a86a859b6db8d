"""Running a lowered plan: the split network, its step, its state and its pipeline."""

from convmesh.runtime.build import parallelize
from convmesh.runtime.net import ParallelNet

__all__ = ["ParallelNet", "parallelize"]
