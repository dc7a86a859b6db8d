"""LSTM, GRU and RNN cells whose weights are cut by hidden units: one time step, as two dense layers and the gates.

The new states stay with their units; the next step gathers the hidden state, as any dense layer cut by filters does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from convmesh.layout import Cut, Layout
from convmesh.layout.layout import LAYOUTS_KEPT, chunked_cut, fair_cut
from convmesh.ops.channels.channel_layers import cut_linear
from convmesh.ops.core.sharded import Sharded, on_mesh
from convmesh.ops.recurrent.cut_units import unit_axes
from convmesh.ops.recurrent.gate_maths import GateMaths


def step_cut(x: Sharded, states: Sequence[Any], weights: Sequence[Any], maths: GateMaths) -> list[Sharded]:
    """The states after a step; tensors are (samples, features)."""
    given, recalled, given_bias, recalled_bias = weights
    axes = unit_axes(x, given)
    x = x.redistribute(_on_other_axes(x.layout, axes))
    own = _own_layout(x.layout, states[0].shape[1], axes)
    hidden, *cells = [on_mesh(state, x.mesh) for state in states]
    kept = hidden if hidden.layout == own else hidden.redistribute(own.with_whole([1]))
    after = maths.step(
        _gates(cut_linear(x, given, given_bias), own),
        _gates(cut_linear(kept, recalled, recalled_bias), own),
        hidden.redistribute(own).local,
        cells[0].redistribute(own).local if cells else None,
    )
    made = [after.hidden] if after.cell is None else [after.hidden, after.cell]
    return [Sharded(local, own, x.mesh) for local in made]


@lru_cache(maxsize=LAYOUTS_KEPT)
def _on_other_axes(layout: Layout, axes: tuple[str, ...]) -> Layout:
    """Samples that the units' own axes cut are made whole; the layer would gather them anyway."""
    kept = tuple(name for name in layout.cuts[0].axes if name not in axes)
    samples: Cut = layout.cuts[0] if kept == layout.cuts[0].axes else fair_cut(layout.mesh, layout.shape[0], kept)
    return layout.replacing({0: samples})


@lru_cache(maxsize=LAYOUTS_KEPT)
def _own_layout(given: Layout, units: int, axes: tuple[str, ...]) -> Layout:
    """The layout of states: samples as they come, units where their weights are."""
    return Layout(given.mesh, (given.cuts[0], chunked_cut(given.mesh, units, axes)))


def _gates(made: Sharded, own: Layout) -> torch.Tensor:
    """This rank's part of all gates, one gate after the other."""
    assert made.layout.cuts[0] == own.cuts[0]
    return made.local.flatten(1)
