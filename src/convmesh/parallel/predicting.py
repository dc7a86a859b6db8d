"""Predictions for plans: their programs lowered for a few ranks that stand for all, and priced."""

from __future__ import annotations

from convmesh.layout import Mesh
from convmesh.oracle import Assumptions, Prediction, predict_programs
from convmesh.parallel.planning import lower_plan
from convmesh.plan import Plan
from convmesh.system import System


def predict(plan: Plan, system: System | str, assumptions: Assumptions | None = None) -> Prediction:
    """What one training step of `plan` costs on a system, given as a value, a name or the path of a file."""
    known = System.load(system) if isinstance(system, str) else system
    ranks = representatives(plan.mesh)
    return predict_programs({rank: lower_plan(plan, rank).program for rank in ranks}, known, assumptions)


def representatives(mesh: Mesh) -> list[int]:
    """Ranks that stand for all: in the middle and at the end along axes that cut space, every stage, else the first."""
    middle = {name: extent // 2 if name in ("depth", "height", "width") else 0 for name, extent in mesh.axes.items()}
    stages = range(mesh.axes.get("pipe", 1))
    return [mesh.rank({**middle, "pipe": stage} if "pipe" in mesh.axes else middle) for stage in stages]
