"""Split LSTM, GRU and RNN layers: samples or hidden units are cut; time, whose steps wait for each other, is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from convmesh.dist import weights_over
from convmesh.errors import UnsupportedError
from convmesh.layout import Cut, Layout
from convmesh.ops.channels.channel_layers import is_cut
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded, on_mesh
from convmesh.ops.recurrent.cut_cell import step_cut
from convmesh.ops.recurrent.cut_units import SequenceCall, run_cut
from convmesh.ops.recurrent.gate_maths import MATHS
from convmesh.ops.shape.along import local_result
from convmesh.ops.shape.reshape import make_whole

Function = Callable[..., Any]
States = tuple[Any, ...]


class _Settings(NamedTuple):
    """As torch's functions take them, after the weights."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool


def _register_sequence(function: Function) -> None:
    @implements(function, takes_cut_weights=True)
    def split(input: Any, hx: Any, weights: Any, *settings: Any) -> Any:  # noqa: A002 - torch's name
        """All outputs, and the last states of every layer."""
        if isinstance(settings[0], (list, tuple)):
            raise UnsupportedError(
                f"`{function.__name__}`: packed sequences have no split version; pad them, and mask the loss."
            )
        told = _Settings(*settings)
        states = tuple(hx) if isinstance(hx, (list, tuple)) else (hx,)
        mesh = next(x.mesh for x in (input, *states) if isinstance(x, Sharded))
        x = on_mesh(input, mesh)
        x = x if told.batch_first else _swapped(x)
        if is_cut(weights[0]):
            outputs, *last = run_cut(x, states, weights, _call(function, told))
        else:
            outputs, *last = _layers(function, x, states, weights, told)
        return (outputs if told.batch_first else _swapped(outputs), *last)


def _call(function: Function, told: _Settings) -> SequenceCall:
    dropout, ways = told.dropout if told.train else 0.0, 2 if told.bidirectional else 1
    return SequenceCall(MATHS[function.__name__], told.has_biases, told.num_layers, dropout, ways)


def _swapped(x: Any) -> Any:
    return x.transpose(0, 1)


def _layers(function: Function, x: Sharded, states: States, weights: Sequence[torch.Tensor], told: _Settings) -> Any:
    """All layers in one torch call; one by one if there is dropout between them, whose masks are ours."""
    if not (told.dropout and told.train) or told.num_layers == 1:
        return _run(function, x, states, weights, told._replace(dropout=0.0))
    count, ways = len(weights) // told.num_layers, 2 if told.bidirectional else 1
    one, last = told._replace(num_layers=1, dropout=0.0), []
    for layer in range(told.num_layers):
        x = F.dropout(x, told.dropout) if layer else x  # type: ignore[arg-type,assignment]
        begun = tuple(state[layer * ways : (layer + 1) * ways] for state in states)
        x, *ended = _run(function, x, begun, weights[layer * count : (layer + 1) * count], one)
        last.append(ended)
    return (x, *(torch.cat(each) for each in zip(*last, strict=True)))


def _run(function: Function, x: Sharded, states: States, weights: Sequence[torch.Tensor], told: _Settings) -> Any:
    """Run on this rank's samples: (samples, time, features), with states of (layers, samples, features)."""
    whole = make_whole(x, [1, 2])
    samples = whole.layout.cuts[0]
    begun = [on_mesh(state, x.mesh).redistribute(_by_samples(whole.layout, state.shape)).local for state in states]
    own = weights_over(x.mesh, whole.layout.axes, *weights)
    settings = told._replace(batch_first=True)
    outputs, *last = function(whole.local, begun if len(begun) > 1 else begun[0], own, *settings)
    made = local_result(whole, lambda _: outputs)
    return made, *(_state(whole, state, samples) for state in last)


def _by_samples(layout: Layout, shape: Sequence[int]) -> Layout:
    return Layout.of(layout.mesh, shape).replacing({1: layout.cuts[0]})


def _state(x: Sharded, local: torch.Tensor, samples: Cut) -> Sharded:
    shape = (local.shape[0], samples.partition.extent, local.shape[2])
    return Sharded(local, _by_samples(x.layout, shape), x.mesh)


_SEQUENCES: tuple[Function, ...] = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
for _function in _SEQUENCES:
    _register_sequence(_function)


def _register_cell(function: Function) -> None:
    @implements(function, takes_cut_weights=True)
    def split(input: Any, hx: Any, *weights: Any) -> Any:  # noqa: A002
        """One time step: (samples, features), with samples or hidden units cut."""
        states = tuple(hx) if isinstance(hx, (list, tuple)) else (hx,)
        mesh = next(x.mesh for x in (input, *states) if isinstance(x, Sharded))
        if is_cut(weights[0]):
            maths = MATHS[function.__name__.removesuffix("_cell")]
            after = step_cut(on_mesh(input, mesh), states, (*weights, None, None)[:4], maths)
            return tuple(after) if maths.has_cell else after[0]
        whole = make_whole(on_mesh(input, mesh), [1])
        target = [Layout.of(mesh.mesh, state.shape).replacing({0: whole.layout.cuts[0]}) for state in states]
        begun = [on_mesh(s, mesh).redistribute(layout).local for s, layout in zip(states, target, strict=True)]
        own = weights_over(mesh, whole.layout.axes, *weights)
        made = function(whole.local, begun if len(begun) > 1 else begun[0], *own)
        if isinstance(made, torch.Tensor):
            return Sharded(made, target[0], mesh)
        return tuple(Sharded(state, layout, mesh) for state, layout in zip(made, target, strict=True))


_CELLS: tuple[Function, ...] = (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
for _function in _CELLS:
    _register_cell(_function)
