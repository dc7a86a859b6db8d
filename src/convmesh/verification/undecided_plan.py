"""Plans before lowering, from which a survey of unsupported operators starts."""

from __future__ import annotations

import warnings

from torch import nn

from convmesh.errors import CaptureWarning, UnsupportedError
from convmesh.graph import Captured, capture
from convmesh.layout import Mesh
from convmesh.planner.staging import StageOptions, with_stages
from convmesh.plans import Plan, preset, strategy_for
from convmesh.verification.drawn_batch import Sample, as_samples


def draft_plan(model: nn.Module, sample: Sample, mesh: Mesh, strategy: str = "auto") -> Plan:
    """The splits of a named strategy, without the dry run that refuses the first layer that cannot be cut."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)  # the verification's notes repeat them
        return draft_of(capture(model, *as_samples(sample), check=False), mesh, strategy)


def draft_of(captured: Captured, mesh: Mesh, strategy: str = "auto") -> Plan:
    """The same for a network that is captured already."""
    name = strategy_for(mesh) if strategy == "auto" else strategy
    made = preset(name, captured.graph, mesh)
    plan = Plan(
        mesh=mesh,
        splits=tuple(made.splits.items()),
        strategy=name,
        shapes=tuple(node.outputs[0].shape for node in captured.graph.inputs),
        signature=captured.graph.signature,
        notes=tuple(made.notes),
        source=captured,
    )
    return _with_stages(captured, plan) if "pipe" in mesh.axes else plan


def _with_stages(captured: Captured, plan: Plan) -> Plan:
    """With stages by the cost of layers; without, if some layers cannot run, which the survey then lists."""
    try:
        return with_stages(captured, plan, StageOptions(), "cpu")  # verification runs on CPUs
    except UnsupportedError:
        return plan
