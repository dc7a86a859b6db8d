"""Running a lowered plan: the split network, its step, its state and its pipeline."""

from convmesh.private_torch.tested_versions import warn_if_untested
from convmesh.runtime.build import parallelize
from convmesh.runtime.net import ParallelNet

__all__ = ["ParallelNet", "parallelize"]

warn_if_untested()
