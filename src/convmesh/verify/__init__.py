"""Is a plan exact for a model? Trains both a few steps on this machine and compares layer by layer."""

from convmesh.verify.draft import draft_plan
from convmesh.verify.result import Difference, LayerCheck, Unsupported, Verification
from convmesh.verify.run import verify

__all__ = ["Difference", "LayerCheck", "Unsupported", "Verification", "draft_plan", "verify"]
