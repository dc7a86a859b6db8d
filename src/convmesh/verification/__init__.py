"""Is a plan exact for a model? Trains both a few steps on this machine and compares layer by layer."""

from convmesh.verification.result import Difference, LayerCheck, Unsupported, Verification
from convmesh.verification.undecided_plan import draft_plan
from convmesh.verification.verifier import verify

__all__ = ["Difference", "LayerCheck", "Unsupported", "Verification", "draft_plan", "verify"]
