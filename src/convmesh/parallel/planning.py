"""Making plans: from a model, a sample, a mesh and a strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from convmesh.errors import PlanError
from convmesh.graph import Captured, capture
from convmesh.layout import Mesh
from convmesh.parallel.lowering.lower import Lowered, lower
from convmesh.parallel.pipeline.planning import StageOptions, with_stages
from convmesh.plan import Plan, PresetOptions, Split, preset, split_of
from convmesh.plan.plan import BatchNorm, Reduction, Schedule
from convmesh.system import System

Sample = torch.Tensor | Sequence[int] | Sequence[torch.Tensor]
Splits = Mapping[str, Split | Mapping[str, Any]]
Strategy = str | Plan | Splits

SUB_BATCHES = 4
"""Enough for most of the transfer to hide, and few enough for large matrix products."""


def plan(
    model: nn.Module | Captured,
    sample: Sample,
    mesh: Mesh | None = None,
    strategy: Strategy = "auto",
    *,
    gpus: int | None = None,
    system: System | str | None = None,
    batchnorm: BatchNorm = "global",
    checkpoint: Sequence[str] = (),
    reduction: Reduction = "bucketed",
    sub_batches: int | None = None,
    least_rows: int = 2,
    spatial_until: str | None = None,
    microbatches: int | None = None,
    schedule: Schedule = "1f1b",
    bytes_stage: int | None = None,
) -> Plan:
    """A plan for training `model` on global batches like `sample` (a tensor or a shape; several in a list).

    Needs no process group. `strategy` is a preset's name, "auto", a mapping of layer names or patterns to splits, or a
    plan that was read from a file, which is checked. "auto" takes the splits that are predicted to be fastest on
    `system`; with `gpus` in place of a mesh, the best mesh too. `sub_batches` parts of a batch travel one by one to
    dense layers that are cut over the axis that cuts samples. `checkpoint` names modules whose activations are computed
    again in backward. A spatial strategy stops where a rank would have fewer than `least_rows` rows, or at the layer
    `spatial_until`. On a mesh with a pipe axis, layers go into stages of about equal predicted time, within
    `bytes_stage` of weights and activations if that is given, and the batch goes through them in `microbatches`
    (default: up to four a stage) by `schedule`.
    """
    captured = model if isinstance(model, Captured) else capture(model, *samples_of(sample))
    options = DraftOptions(
        batchnorm=batchnorm,
        checkpoint=tuple(checkpoint),
        reduction=reduction,
        sub_batches=sub_batches,
        preset=PresetOptions(least_rows=least_rows, spatial_until=spatial_until),
        stages=StageOptions(microbatches, schedule, bytes_stage),
    )
    if mesh is None or gpus is not None:
        return _searched(captured, mesh, strategy, gpus, system, options)
    if isinstance(strategy, Plan):
        return _bound(strategy, captured, mesh)
    if strategy == "auto":
        from convmesh.parallel.searching import best_on  # which makes plans

        return best_on(captured, mesh, system, options)
    return lower(captured, draft(captured, mesh, strategy, options)).plan


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """What a user may choose about a plan, beside the mesh and the strategy."""

    batchnorm: BatchNorm = "global"
    checkpoint: tuple[str, ...] = ()
    reduction: Reduction = "bucketed"
    sub_batches: int | None = None
    preset: PresetOptions = field(default_factory=PresetOptions)
    stages: StageOptions = field(default_factory=StageOptions)


def draft(captured: Captured, mesh: Mesh, strategy: str | Splits, options: DraftOptions) -> Plan:
    """A plan as it is asked for, with its stages; what is left to the layers is still open."""
    splits, name, notes = _splits(strategy, captured, mesh, options.preset)
    made = Plan(
        mesh=mesh,
        splits=splits,
        strategy=name,
        shapes=tuple(node.outputs[0].shape for node in captured.graph.inputs),
        batchnorm=options.batchnorm,
        checkpoint=options.checkpoint,
        reduction=options.reduction,
        sub_batches=options.sub_batches or _sub_batches(name, captured, mesh),
        signature=captured.graph.signature,
        notes=notes,
        source=captured,
    )
    made.check(captured.graph)
    if "pipe" in mesh.axes:
        made = with_stages(captured, made, options.stages)
        made.check(captured.graph)
    return made


def _searched(
    captured: Captured,
    mesh: Mesh | None,
    strategy: Strategy,
    gpus: int | None,
    system: System | str | None,
    options: DraftOptions,
) -> Plan:
    """The best plan on any mesh of so many ranks."""
    from convmesh.parallel.searching import search_captured  # which makes plans

    if gpus is None or mesh is not None:
        raise PlanError("give `mesh`, such as cm.Mesh(data=2, height=2), or `gpus`, their number, and not both.")
    if not isinstance(strategy, str):
        raise PlanError(
            "`gpus` searches for the mesh, but a plan or a split for each layer needs its own: give `mesh`."
        )
    strategies = None if strategy == "auto" else (strategy,)
    return search_captured(captured, system, gpus, strategies=strategies, options=options).best.plan


def _splits(
    strategy: str | Splits, captured: Captured, mesh: Mesh, options: PresetOptions
) -> tuple[tuple[tuple[str, Split], ...], str, tuple[str, ...]]:
    if isinstance(strategy, str):
        made = preset(strategy, captured.graph, mesh, options)
        return tuple(made.splits.items()), strategy, tuple(made.notes)
    if not isinstance(strategy, Mapping):
        raise PlanError(f"`strategy` (={strategy!r}) must be the name of one, or map layers to splits.")
    return tuple((layer, split_of(value, layer)) for layer, value in strategy.items()), "custom", ()


def _sub_batches(strategy: str, captured: Captured, mesh: Mesh) -> int:
    samples = captured.graph.inputs[0].outputs[0].shape[0]
    return max(1, min(SUB_BATCHES, samples // mesh.size)) if strategy == "hybrid" else 1


def _bound(read: Plan, captured: Captured, mesh: Mesh) -> Plan:
    """A plan from a file, for a model."""
    if read.mesh != mesh:
        raise PlanError(f"the plan is for {read.mesh}, but `mesh` is {mesh}; give it `plan.mesh`.")
    read.check(captured.graph)
    shapes = tuple(node.outputs[0].shape for node in captured.graph.inputs)
    return lower(captured, replace(read, source=captured, shapes=shapes)).plan


def samples_of(sample: Sample) -> list[Any]:
    """One sample, or several: a list of tensors or of shapes."""
    if isinstance(sample, torch.Tensor) or all(isinstance(extent, int) for extent in sample):
        return [sample]
    return list(sample)


def lower_plan(plan: Plan, rank: int = 0) -> Lowered:
    """The plan worked out for a rank of its mesh, if it was made from a model."""
    if plan.source is None:
        raise PlanError("the plan was read from a file; give it a model with `cm.plan(model, sample, mesh, plan)`.")
    return lower(plan.source, plan, rank)
