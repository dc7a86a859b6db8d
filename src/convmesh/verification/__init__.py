"""Is a plan exact for a model? A few training steps on this machine, compared layer by layer."""

from convmesh.verification.result import Difference, LayerCheck, Unsupported, Verification
from convmesh.verification.undecided_plan import draft_plan
from convmesh.verification.verifier import verify

__all__ = ["Difference", "LayerCheck", "Unsupported", "Verification", "draft_plan", "verify"]
