"""LSTM, GRU and RNN layers whose weights are cut by hidden units: every rank has the same units of each gate.

The input is whole on every rank, or gathered once for all time steps; then every step shows the new states to all
ranks (`hidden_exchange`), so a layer's output is whole on every rank at no cost. Between the layers of one module each
rank has its own units' part of the gradient of that output; the layer below sums it where the units are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from convmesh.dist import OpenMesh, copy_over, weights_over
from convmesh.dist.cut_weights import local_shape, shard_of
from convmesh.dist.exchange import exchange
from convmesh.layout import ExchangePlan, Layout, plan_exchange
from convmesh.layout.channels import ChannelSplit
from convmesh.layout.layout import LAYOUTS_KEPT, chunked_cut, fair_cut
from convmesh.ops.channels.channel_layers import channel_split
from convmesh.ops.channels.undecided_weight import PlannedWeight
from convmesh.ops.core.autocast import autocast_type, without_autocast
from convmesh.ops.core.sharded import Sharded, on_mesh
from convmesh.ops.recurrent.gate_maths import GateMaths
from convmesh.ops.recurrent.hidden_exchange import HiddenExchange, ShownUnits, SummedFeatures, every_rank_apart
from convmesh.ops.recurrent.recurrence import Recurrence, RecurrenceFunction
from convmesh.private_torch.dtensors import is_dtensor

Axes = tuple[str, ...]
Optional = torch.Tensor | None


@dataclass(frozen=True)
class SequenceCall:
    """What a call of a recurrent function asks for, apart from its tensors."""

    maths: GateMaths
    has_biases: bool
    layers: int
    dropout: float
    """Between layers; 0 outside training."""
    ways: int
    """Directions in time."""


@dataclass(frozen=True)
class _Weights:
    """One direction of one layer, on this rank."""

    given: torch.Tensor
    recalled: torch.Tensor
    given_bias: Optional
    recalled_bias: Optional
    projection: Optional


def unit_axes(x: Sharded, weight: torch.Tensor) -> Axes:
    """The axes that cut the units of a recurrent layer: decided now, or given by the weight's placement."""
    if isinstance(weight, PlannedWeight):
        assert weight.decide is not None
        weight.decided = weight.decide(x, _plans_of_none, 1, x.dim() - 1)
        return weight.decided.gathered
    assert is_dtensor(weight)
    return channel_split(weight, 0).gathered


def _plans_of_none(split: ChannelSplit) -> Any:
    """Recurrent layers have one algorithm, so nothing is compared."""
    del split


def run_cut(x: Sharded, states: Sequence[Any], weights: Sequence[torch.Tensor], call: SequenceCall) -> list[Sharded]:
    """All outputs, and the last states of every layer; `x` is (samples, time, features)."""
    axes = unit_axes(x, weights[0])
    x = _with_dtype(x.redistribute(_entering(x.layout, axes)))
    begun = [_begun(state, x, axes if place else ()) for place, state in enumerate(states)]
    projects = len(begun) == 2 and begun[0].shape[2] != begun[1].shape[2]
    own = _own_weights(x, weights, axes, call, projects)
    hidden: HiddenExchange = SummedFeatures(x.mesh, axes)
    if not projects:
        hidden = ShownUnits(x.mesh, axes, x.layout.cuts[0], begun[0].shape[2])
    y, firsts, last = _gathered(x, axes), [state.local for state in begun], list[list[torch.Tensor]]()
    for layer in range(call.layers):
        if layer and call.dropout:
            y = F.dropout(y, call.dropout)  # type: ignore[arg-type,assignment]
        here = [first[layer * call.ways : (layer + 1) * call.ways] for first in firsts]
        sums = layer + 1 < call.layers
        with without_autocast(x.device):
            y, ended = _layer(y, here, own[layer], Recurrence(call.maths, hidden, sums))
        last.append(ended)
    return [y, *(state.like(torch.cat(each)) for state, each in zip(begun, zip(*last, strict=True), strict=True))]


@lru_cache(maxsize=LAYOUTS_KEPT)
def _entering(layout: Layout, axes: Axes) -> Layout:
    """Samples stay cut by other axes; features stay cut where those of the units cut them; time is whole."""
    kept = tuple(name for name in layout.cuts[0].axes if name not in axes)
    samples = layout.cuts[0] if kept == layout.cuts[0].axes else fair_cut(layout.mesh, layout.shape[0], kept)
    features = layout.cuts[2] if layout.cuts[2] == chunked_cut(layout.mesh, layout.shape[2], axes) else None
    entering = layout.with_whole([0, 1, 2]).replacing({0: samples})
    return entering if features is None else entering.replacing({2: features})


def _with_dtype(x: Sharded) -> Sharded:
    """The tensor in autocast's type, if autocast is on."""
    dtype = autocast_type(x.device)
    return x if dtype is None or x.dtype == torch.float64 else x.like(x.local.to(dtype))


def _begun(state: Any, x: Sharded, axes: Axes) -> Sharded:
    """A first state, (layers, samples, units), with the samples of `x`, and units cut by `axes`."""
    target = Layout.of(x.mesh.mesh, state.shape).replacing({1: x.layout.cuts[0]})
    target = target.replacing({2: chunked_cut(target.mesh, target.shape[2], axes)})
    here = on_mesh(state, x.mesh).redistribute(target)
    return here.like(here.local.to(x.dtype))


def _own_weights(
    x: Sharded, weights: Sequence[torch.Tensor], axes: Axes, call: SequenceCall, projects: bool
) -> list[list[_Weights]]:
    """This rank's weights, by layer and direction."""
    count = len(weights) // (call.layers * call.ways)
    local = [_local(w, x.mesh, axes, 1 if projects and place % count == count - 1 else 0) for place, w in
             enumerate(weights)]  # fmt: skip
    others = tuple(name for name in x.layout.axes if name not in axes)
    shared = [None if w is None else w.to(x.dtype) for w in weights_over(x.mesh, others, *local)]
    each = [shared[first : first + count] for first in range(0, len(shared), count)]
    named = [_named(group, call.has_biases, projects) for group in each]
    return [named[layer * call.ways : (layer + 1) * call.ways] for layer in range(call.layers)]


def _local(weight: torch.Tensor, mesh: OpenMesh, axes: Axes, dim: int) -> torch.Tensor:
    if is_dtensor(weight):
        return shard_of(weight, mesh)
    shape = local_shape(weight.shape, mesh, {dim: axes})
    return torch.empty(shape, dtype=weight.dtype, device="meta", requires_grad=weight.requires_grad)


def _named(group: Sequence[Optional], has_biases: bool, projects: bool) -> _Weights:
    given, recalled, *rest = group
    assert given is not None
    assert recalled is not None
    biases = rest[:2] if has_biases else (None, None)
    return _Weights(given, recalled, biases[0], biases[1], rest[-1] if projects else None)


def _gathered(x: Sharded, axes: Axes) -> Sharded:
    """The input with all features; each rank computes a part of its gradient, and backward sums them."""
    if not x.layout.is_cut(2):
        (copy,) = copy_over(x.mesh, axes, x.local)
        assert copy is not None
        return x.like(copy)
    whole = exchange(x.local, _features_apart(x.layout, axes, x.mesh.rank), x.mesh)
    return Sharded(whole, x.layout.with_whole([2]), x.mesh)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _features_apart(layout: Layout, axes: Axes, rank: int) -> ExchangePlan:
    return plan_exchange(layout, every_rank_apart(layout, axes), rank)


def _layer(
    x: Sharded, begun: list[torch.Tensor], weights: list[_Weights], layer: Recurrence
) -> tuple[Sharded, list[torch.Tensor]]:
    """One layer: its output, (samples, time, directions · features), and its last states."""
    given = [F.linear(x.local, w.given, w.given_bias).transpose(0, 1) for w in weights]
    given[1:] = [each.flip(0) for each in given[1:]]
    shown, last, cell = RecurrenceFunction.apply(
        torch.stack(given, 1),
        begun[0],
        begun[1] if layer.maths.has_cell else None,
        torch.stack([w.recalled for w in weights]),
        _stacked([w.recalled_bias for w in weights], 1),
        _stacked([w.projection for w in weights], None),
        layer,
    )
    first, *second = shown.unbind(1)
    made = torch.cat([each.transpose(0, 1) for each in (first, *(other.flip(0) for other in second))], -1)
    features = fair_cut(x.mesh.mesh, made.shape[2], ())
    return Sharded(made, x.layout.replacing({2: features}), x.mesh), [last] if cell is None else [last, cell]


def _stacked(tensors: Sequence[Optional], row: int | None) -> Optional:
    """The tensors of all directions as one, if there are any; with an extra dim at `row`."""
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return None
    made = torch.stack(present)
    return made if row is None else made.unsqueeze(row)
