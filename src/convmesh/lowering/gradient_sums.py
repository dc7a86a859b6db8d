"""What a plan's reducer does in a step: recorded from the reducer itself, without data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from convmesh.dist import OpenMesh
from convmesh.dist.flat_buffers import root_of
from convmesh.gradients.reducers import reducer_of
from convmesh.gradients.reduction import GradientReducer
from convmesh.gradients.root_update import BroadcastReducer
from convmesh.gradients.scattered import ShardedReducer
from convmesh.lowering.dry_values import lying
from convmesh.lowering.live_bytes import HeldStorages
from convmesh.lowering.recent_results import RecentResults
from convmesh.lowering.recorder import recorded
from convmesh.lowering.summed_axes import SummedAxes
from convmesh.plans import BucketProgram, Program, ShowingProgram, Step, WeightProgram
from convmesh.plans.summing import Reduction, Summing

MOST_SUMS = 256
"""Sums kept: those of a search's meshes, or of the same meshes in two scaling curves."""


@dataclass(frozen=True)
class Sums:
    """What a reducer does for some weights on one rank."""

    buckets: tuple[BucketProgram, ...]
    shown: tuple[ShowingProgram, ...]
    updated: Mapping[str, int]
    bytes_buckets: int


_known: RecentResults[Any, Sums] = RecentResults(MOST_SUMS)


def with_sums(program: Program, sum_axes: Mapping[str, tuple[str, ...]], mesh: OpenMesh, summing: Summing) -> Program:
    """The program with the sums of gradients, as after a backward pass that reached every weight, and what follows."""
    held = {weight.name: weight for weight in program.weights}
    alike = SummedAxes.of(mesh, sum_axes.values(), summing.reduction)
    inside = {weight: alike.inside(axes) for weight, axes in sum_axes.items()}
    summed = tuple((weight, held[weight].local_shape, held[weight].dtype, axes) for weight, axes in inside.items())
    key = (summing, summed, alike.open.mesh, _place(alike.open, inside, summing.reduction), mesh.stands_for)
    sums = _known.get(key)
    if sums is None:
        sums = _known[key] = _reduced({weight: held[weight] for weight in inside}, inside, alike.open, summing)
    sums = _outside(sums, alike)
    weights = tuple([_updating(weight, sums.updated.get(weight.name)) for weight in program.weights])
    return replace(program, weights=weights, buckets=sums.buckets, shown=sums.shown, bytes_buckets=sums.bytes_buckets)


def _outside(sums: Sums, alike: SummedAxes) -> Sums:
    """The sums on the rank's own mesh."""
    buckets = tuple(BucketProgram(b.weights, tuple(map(alike.outside, b.legs))) for b in sums.buckets)
    shown = tuple(replace(s, start=alike.outside(s.start), finish=alike.outside(s.finish)) for s in sums.shown)
    return replace(sums, buckets=buckets, shown=shown)


def _updating(weight: WeightProgram, elements: int | None) -> WeightProgram:
    return weight if weight.elements_updated == elements else replace(weight, elements_updated=elements)


def _place(mesh: OpenMesh, sum_axes: Mapping[str, tuple[str, ...]], name: Reduction) -> Any:
    """How the sums depend on the rank: in an all-reduce, only on whether it is the first."""
    if name not in ("bucketed", "hierarchical"):
        return mesh.rank
    return tuple(root_of(mesh, axes) == mesh.rank for axes in dict.fromkeys(sum_axes.values()))


def _reduced(
    held: Mapping[str, WeightProgram], sum_axes: Mapping[str, tuple[str, ...]], mesh: OpenMesh, summing: Summing
) -> Sums:
    parameters = {weight: _parameter(program) for weight, program in held.items()}
    names = {parameter: weight for weight, parameter in parameters.items()}
    storages = HeldStorages("meta")
    before = storages.start(parameters.values())
    with storages:
        axes_of = [(parameters[weight], axes) for weight, axes in sum_axes.items()]
        reducer = reducer_of(summing)(mesh, axes_of, watches=False)
    bytes_buckets = storages.bytes_held - before
    for parameter in parameters.values():
        parameter.grad = lying(parameter, None)
    buckets = _buckets(reducer, names)
    sums = Sums(buckets, updated=_updated(reducer, names), shown=_shown(reducer, names), bytes_buckets=bytes_buckets)
    reducer.close()
    return sums


def _buckets(reducer: GradientReducer, names: Mapping[nn.Parameter, str]) -> tuple[BucketProgram, ...]:
    """The buckets' legs, each run for all buckets before the next, as in `reduce_now`."""
    legs = [[_steps(reducer, leg, bucket) for bucket in reducer.buckets] for leg in ("start", "relay", "finish")]
    weights = [tuple(names[slot.parameter] for slot in bucket.slots) for bucket in reducer.buckets]  # type: ignore[index]
    return tuple(BucketProgram(*both) for both in zip(weights, zip(*legs, strict=True), strict=True))


def _updated(reducer: GradientReducer, names: Mapping[nn.Parameter, str]) -> dict[str, int]:
    """Elements of every summed weight for which the optimiser finds a gradient on this rank."""
    gradients = {slot.parameter: slot.parameter.grad for bucket in reducer.buckets for slot in bucket.slots}
    if isinstance(reducer, ShardedReducer):
        for bucket in reducer.scattered:
            gradients |= {parameter: shard.grad for parameter, shard in bucket.shards.items()}
    return {names[p]: 0 if grad is None else grad.numel() for p, grad in gradients.items()}  # type: ignore[index]


def _shown(reducer: GradientReducer, names: Mapping[nn.Parameter, str]) -> tuple[ShowingProgram, ...]:
    """What travels after the optimiser's step."""
    if isinstance(reducer, BroadcastReducer):
        sent: list[Any] = list(reducer.chunks)
        legs, of, at_use = ("start", "wait"), [chunk.parameters for chunk in reducer.chunks], True
    elif isinstance(reducer, ShardedReducer):
        sent = list(reducer.scattered)
        legs, of, at_use = ("start_showing", "finish_showing"), [[s.parameter for s in b.slots] for b in sent], False
    else:
        return ()
    starts, ends = ([_steps(reducer, leg, part) for part in sent] for leg in legs)
    weights = [tuple(names[p] for p in parameters) for parameters in of]
    return tuple(ShowingProgram(w, start, end, at_use) for w, start, end in zip(weights, starts, ends, strict=True))


def _steps(reducer: GradientReducer, leg: str, part: Any) -> tuple[Step, ...]:
    with recorded(reducer.mesh) as steps, torch.no_grad():
        getattr(part, leg)()
    return tuple(steps)


def _parameter(weight: WeightProgram) -> nn.Parameter:
    return nn.Parameter(torch.empty(weight.local_shape, dtype=getattr(torch, weight.dtype), device="meta"))
