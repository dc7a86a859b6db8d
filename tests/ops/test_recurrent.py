"""LSTM, GRU and RNN layers with samples, time or features cut."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import convmesh as cm
from convmesh import Mesh, UnsupportedError, replicated
from convmesh.ops import manual_seed
from convmesh.testing import SplitCase, opened
from tests.conftest import Pools
from tests.draws import draws

Check = Callable[[SplitCase], None]
MESH = Mesh(data=2, width=2)
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
FEATURES, HIDDEN = 3, 4


def weight_shapes(name: str, layers: int, ways: int) -> tuple[tuple[int, ...], ...]:
    rows, shapes = GATES[name] * HIDDEN, list[tuple[int, ...]]()
    for layer in range(layers):
        shapes += [(rows, ways * HIDDEN if layer else FEATURES), (rows, HIDDEN), (rows,), (rows,)] * ways
    return tuple(shapes)


def run_layers(x: Any, *weights: Any, name: str, layers: int, ways: int, batch_first: bool) -> list[Any]:
    samples = x.shape[0 if batch_first else 1]
    begun = x.new_zeros((layers * ways, samples, HIDDEN)) + 0.1
    states = (begun, begun * 2) if name == "lstm" else begun
    made, *last = getattr(torch, name)(x, states, weights, True, layers, 0.0, True, ways == 2, batch_first)
    return [made, *last]


@given(
    cut=st.sampled_from([{}, {0: "data"}, {1: "width"}, {0: "data", 1: "width"}, {2: "width"}, {1: ("data", "width")}]),
    name=st.sampled_from([*GATES]),
    layers=st.integers(1, 2),
    ways=st.integers(1, 2),
    batch_first=st.booleans(),
    samples=st.integers(1, 5),
)
@draws(20)
@pytest.mark.operator("lstm, gru, rnn", "any dims cut; layers, both directions, batch_first; initial states")
def test_layers(
    cut: dict[int, str], name: str, layers: int, ways: int, batch_first: bool, samples: int, check: Check
) -> None:
    call = partial(run_layers, name=name, layers=layers, ways=ways, batch_first=batch_first)
    shape = (samples, 5, FEATURES) if batch_first else (5, samples, FEATURES)
    check(SplitCase(call, MESH, (shape,), weight_shapes(name, layers, ways), cuts=(cut,)))


def run_cell(x: Any, state: Any, *weights: Any, name: str) -> Any:
    return getattr(torch, name)(x, (state, state * 2) if name == "lstm_cell" else state, *weights)


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
@pytest.mark.operator("lstm_cell, gru_cell, rnn_cell", "samples and features cut")
def test_cells(name: str, check: Check) -> None:
    for cut in ({0: "data"}, {0: "width", 1: "data"}):
        shapes, params = ((3, FEATURES), (3, HIDDEN)), weight_shapes(name, 1, 1)
        check(SplitCase(partial(run_cell, name=f"{name}_cell"), MESH, shapes, params, cuts=(cut, {0: "data"})))


def dropped() -> float:
    """Two layers with dropout between them, with the samples cut and whole."""
    mesh = opened(Mesh(data=2))
    torch.manual_seed(0)
    layers, x = nn.GRU(FEATURES, HIDDEN, 2, dropout=0.5, batch_first=True), torch.randn(4, 6, FEATURES)
    made = []
    for tensor in (cm.shard(x, mesh, {0: "data"}), replicated(x, mesh)):
        manual_seed(mesh, 3)
        made.append(layers(tensor)[0].gather())
    return float((made[0] - made[1]).abs().max().item())


def test_dropout_between_layers_is_the_same_however_samples_are_cut(pools: Pools) -> None:
    assert max(pools[2].run(dropped)) < 1e-6


def pack() -> str:
    mesh = opened(Mesh(data=2))
    layer, x = nn.GRU(FEATURES, HIDDEN), cm.shard(torch.randn(6, FEATURES), mesh, {})
    packed = nn.utils.rnn.PackedSequence(x, torch.tensor([2, 2, 2]))  # type: ignore[arg-type]
    try:
        layer(packed)
    except UnsupportedError as error:
        return str(error)
    return ""


def test_packed_sequences_are_refused(pools: Pools) -> None:
    assert "pad them" in pools[2].run(pack)[0]


class Reader(nn.Module):
    """Convolutions over a signal, then layers that read it in time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(3, 8, 3, padding=1), nn.Linear(12, 4)
        self.lstm, self.gru = nn.LSTM(8, 6, bidirectional=True, batch_first=True), nn.GRU(12, 12, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen, _ = self.lstm(self.conv(x).transpose(1, 2))
        made: torch.Tensor = self.head(self.gru(seen)[1][-1])
        return made


@pytest.mark.parametrize(
    ("strategy", "mesh"), [("spatial", Mesh(width=2)), ("data+filter", Mesh(data=2, filter=2))], ids=str
)
def test_networks_with_recurrent_layers_are_exact(strategy: str, mesh: Mesh) -> None:
    model = Reader().double()
    sample = torch.randn(4, 3, 16, dtype=torch.float64)
    verified = cm.verify(model, sample, cm.plan(model, sample, mesh, strategy), steps=1)
    assert verified.ok, str(verified)
