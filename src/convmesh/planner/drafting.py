"""Drafting plans: what a user asks for, as a plan whose open choices lowering still has to make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from convmesh.errors import PlanError
from convmesh.graph import Captured, capture
from convmesh.layout import Mesh
from convmesh.planner.staging import StageOptions, with_stages
from convmesh.plans import Plan, PresetOptions, Split, preset, split_of
from convmesh.plans.plan import Attention, BatchNorm, Precision
from convmesh.plans.summing import Compression, Reduction

Sample = torch.Tensor | Sequence[int] | Sequence[torch.Tensor]
Splits = Mapping[str, Split | Mapping[str, Any]]

SUB_BATCHES = 4
"""Enough for most of the transfer to hide, and few enough for large matrix products."""


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """What a user may choose about a plan, besides the mesh and the strategy."""

    batchnorm: BatchNorm = "global"
    checkpoint: tuple[str, ...] = ()
    reduction: Reduction = "bucketed"
    compression: Compression = "none"
    ranks_per_host: int = 1
    attention: Attention | None = None
    sub_batches: int | None = None
    precision: Precision = ""
    compile: bool = False
    preset: PresetOptions = field(default_factory=PresetOptions)
    stages: StageOptions = field(default_factory=StageOptions)


def draft(captured: Captured, mesh: Mesh, strategy: str | Splits, options: DraftOptions, device: str = "cuda") -> Plan:
    """A plan as the user asks for it, with stages balanced for a kind of device; lowering decides what is left open."""
    splits, name, notes = _splits(strategy, captured, mesh, options.preset)
    made = Plan(
        mesh=mesh,
        splits=splits,
        strategy=name,
        shapes=tuple(node.outputs[0].shape for node in captured.graph.inputs),
        batchnorm=options.batchnorm,
        checkpoint=options.checkpoint,
        reduction=options.reduction,
        compression=options.compression,
        ranks_per_host=options.ranks_per_host,
        attention=options.attention or "gather",
        sub_batches=options.sub_batches or _sub_batches(name, captured, mesh),
        precision=options.precision,
        compile=options.compile,
        signature=captured.graph.signature,
        notes=notes,
        source=captured,
    )
    made.check(captured.graph)
    if "pipe" in mesh.axes:
        made = with_stages(captured, made, options.stages, device)
        made.check(captured.graph)
    return made


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


def network_of(model: nn.Module | Captured, sample: Sample) -> Captured:
    """The network to plan for, without its weights: plans keep it, and may outlive the model."""
    captured = model if isinstance(model, Captured) else capture(model, *samples_of(sample))
    return captured.without_weights()


def samples_of(sample: Sample) -> list[Any]:
    """One sample, or several: a list of tensors or of shapes."""
    if isinstance(sample, torch.Tensor) or all(isinstance(extent, int) for extent in sample):
        return [sample]
    return list(sample)
