"""LSTM, GRU and RNN layers with samples, time, features or hidden units cut."""

import copy
from collections import Counter
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
from convmesh.dist.cut_weights import cut_weight
from convmesh.ops import manual_seed
from convmesh.plans import Split
from convmesh.runtime.full_state import whole as whole_of
from convmesh.testing import SplitCase, opened
from tests.conftest import Pools
from tests.draws import draws
from tests.lowering.test_program_traffic import ByAxes, step, told

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


def dropped_with_units() -> float:
    """The same with hidden units cut and whole."""
    mesh = opened(Mesh(filter=2))
    torch.manual_seed(0)
    layers, x = nn.LSTM(FEATURES, HIDDEN, 2, dropout=0.5, batch_first=True), torch.randn(4, 6, FEATURES)
    made = []
    for each in (layers, cut_layer(layers, mesh, "filter")):
        manual_seed(mesh, 3)
        made.append(each(replicated(x, mesh))[0].gather().detach())
    return float((made[0] - made[1]).abs().max().item())


def test_dropout_between_layers_is_the_same_however_units_are_cut(pools: Pools) -> None:
    assert max(pools[2].run(dropped_with_units)) < 1e-6


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


Layer = tuple[type[nn.Module], dict[str, Any]]
UNITS: list[Layer] = [
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"num_layers": 2, "proj_size": 3}),
    (nn.LSTM, {"proj_size": 2, "bidirectional": True, "bias": False}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    (nn.GRU, {"bias": False, "batch_first": True}),
    (nn.RNN, {"num_layers": 2, "nonlinearity": "relu"}),
    (nn.RNN, {"bidirectional": True}),
]


def cut_layer(layer: nn.Module, mesh: cm.OpenMesh, axis: str) -> nn.Module:
    """A copy whose hidden units are cut."""
    cut, own = copy.deepcopy(layer), dict(layer.named_parameters())
    gates = own["bias_hh_l0" if "bias_hh_l0" in own else "weight_hh_l0"].shape[0] // HIDDEN
    for name, weight in layer.named_parameters():
        rows = {1: (axis,)} if "weight_hr" in name else {0: (axis,)}
        setattr(cut, name, nn.Parameter(cut_weight(weight.detach(), mesh, rows, gates if 0 in rows else 1)))
    return cut


def unit_errors(mesh: Mesh, axis: str, cut: dict[int, str], layers: list[Layer]) -> list[float]:
    """The largest difference of outputs, states and all gradients from those of one device, for each layer."""
    opening, found = opened(mesh), []
    for kind, options in layers:
        torch.manual_seed(0)
        layer = kind(FEATURES + 1, HIDDEN, **options).double()
        ways = (2 if options.get("bidirectional") else 1) * options.get("num_layers", 1)
        sizes = [options.get("proj_size", HIDDEN), HIDDEN][: 2 if kind is nn.LSTM else 1]
        x = torch.randn(2, 4, FEATURES + 1, dtype=torch.float64)
        begun = [torch.randn(ways, x.shape[0 if options.get("batch_first") else 1], n).double() for n in sizes]
        places = [cut, *[{}] * len(sizes)] if options.get("batch_first") else [{1 - d if d < 2 else d: a for d, a in
                 cut.items()}, *[{}] * len(sizes)]  # fmt: skip
        whole = [tensor.clone().requires_grad_() for tensor in (x, *begun)]
        shards = [cm.shard(tensor, opening, place) for tensor, place in zip((x, *begun), places, strict=True)]
        for each in shards:
            each.requires_grad_()
        mine = cut_layer(layer, opening, axis)
        expected, made = (_flat(*of(xs[0], tuple(xs[1:]) if len(xs) > 2 else xs[1])) for of, xs in
                          ((layer, whole), (mine, shards)))  # fmt: skip
        grads = [torch.randn_like(tensor) for tensor in expected]
        torch.autograd.backward(expected, grads)
        pairs = [(y.local, e[y.box.slices()]) for y, e in zip(made, expected, strict=True)]
        torch.autograd.backward([y.local for y in made], [g[y.box.slices()] for y, g in zip(made, grads, strict=True)])
        pairs += [(s.local.grad, w.grad[s.box.slices()]) for s, w in zip(shards, whole, strict=True)]  # type: ignore[index]
        weights = zip(layer.parameters(), mine.parameters(), strict=True)
        pairs += [(whole_of(here.grad, opening), there.grad) for there, here in weights]  # type: ignore[arg-type]
        found.append(max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs))
    return found


def _flat(outputs: Any, states: Any) -> list[Any]:
    return [outputs, *states] if isinstance(states, tuple) else [outputs, states]


@pytest.mark.operator("lstm, gru, rnn", "hidden units cut, with projections")
def test_layers_with_cut_hidden_units_are_exact(pools: Pools) -> None:
    for cut in ({}, {2: "channel"}):
        for found in pools[2].run(unit_errors, Mesh(channel=2), "channel", cut, UNITS):
            assert max(found) < 1e-12
    for found in pools[4].run(unit_errors, Mesh(data=2, filter=2), "filter", {0: "data"}, UNITS[:3]):
        assert max(found) < 1e-12


class Cells(nn.Module):
    """Steps of time written out, in one layer after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.LSTMCell(3, 8), nn.GRUCell(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[0], 8)
        seen = h
        for t in range(x.shape[2]):
            h, c = self.first(x[:, :, t], (h, c))
            seen = self.second(h, seen)
        made: torch.Tensor = self.head(seen)
        return made


def run_units(model: nn.Module, strategy: str, mesh: Mesh) -> tuple[ByAxes, ByAxes, dict[str, float], float]:
    """What a step sends, what its program says, the share of each weight that is here, and the error of gradients."""
    x, whole = (
        torch.randn(4, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        copy.deepcopy(model),
    )
    net = cm.parallelize(model, cm.plan(model, x, mesh, strategy), mesh=opened(mesh))
    shares = {w.name: torch.Size(w.local_shape).numel() / torch.Size(w.shape).numel() for w in net.program.weights}
    sent = step(net, x)
    whole(x).sum().backward()
    own = net.full_gradients()
    worst = max(float((own[name] - p.grad).abs().max()) for name, p in whole.named_parameters())  # type: ignore[operator]
    return sent, told(net.program), shares, worst


@pytest.mark.parametrize("model", [Reader, Cells], ids=lambda m: m.__name__)
@pytest.mark.parametrize("axis", ["filter", "channel"])
def test_weights_are_cut_gradients_exact_and_programs_say_what_is_sent(
    pools: Pools, model: type[nn.Module], axis: str
) -> None:
    for sent, program, shares, worst in pools[2].run(run_units, model().double(), axis, Mesh(**{axis: 2})):
        assert worst < 1e-12
        assert sent == program
        assert sent
        assert all(share == 0.5 for name, share in shares.items() if "_ih" in name or "_hh" in name)


class Only(nn.Module):
    """One layer; a model that is one itself is looked into, and has no layer to cut."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x)[0]
        return made


def sent_by_layer() -> ByAxes:
    """Of one layer on a whole input that does not learn."""
    mesh, samples, time, hidden = Mesh(channel=2), 3, 5, 8
    model = Only(nn.LSTM(4, hidden, batch_first=True))
    net = cm.parallelize(model, cm.plan(model, (samples, time, 4), mesh, "channel"), mesh=opened(mesh))
    x, sent = net.shard_input(torch.randn(samples, time, 4)), Counter[Any]()
    with net.mesh.traffic.watch() as seen:
        net(x).sum().backward()
    sent.update(seen.bytes_sent)
    return sent


def test_each_step_of_time_sends_a_rank_s_own_states_once_each_way(pools: Pools) -> None:
    samples, time, mine, itemsize = 3, 5, 4, 4
    forward, backward = time * samples * mine * itemsize, (time - 1) * samples * mine * itemsize
    assert [sum(sent.values()) for sent in pools[2].run(sent_by_layer)] == [forward + backward] * 2


def test_units_that_do_not_divide_stay_whole_with_a_note() -> None:
    plan = cm.plan(Only(nn.GRU(4, 6, batch_first=True)), (4, 5, 4), Mesh(filter=4), "filter")
    assert not any(split.channel for _, split in plan.splits)
    assert "6 hidden units do not divide over 4 ranks" in plan.notes[0]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (Split(channel=("filter",)), "6 hidden units do not divide over 4 ranks; the largest split that works is 3"),
        (Split(channel=("channel",), algorithm="x"), "algorithm 'x' is for layers without memory"),
        (Split(channel=("channel", "filter")), "hidden units are cut by one axis, not by"),
    ],
)
def test_splits_that_cannot_be_are_refused(split: Split, message: str) -> None:
    model = Only(nn.GRU(4, 6, batch_first=True))
    with pytest.raises(UnsupportedError, match=message):
        cm.plan(model, (4, 5, 4), Mesh(channel=2, filter=4), {"*": split})


def compiled_units(model: nn.Module) -> float:
    """The largest difference between gradients of an eager step and of one that was traced and is replayed."""
    mesh, x, found = Mesh(filter=2), torch.randn(4, 3, 6, dtype=torch.float64), []
    for compiling in (False, "eager"):
        network = copy.deepcopy(model)
        plan = cm.plan(network, x, mesh, "filter")
        net = cm.parallelize(network, plan, nn.functional.mse_loss, mesh=opened(mesh), compile=compiling)
        for _ in range(2):
            net.zero_grad()
            net(net.shard_input(x), net.shard_target(torch.zeros(4, 4, dtype=torch.float64))).backward()
        found.append([*net.full_gradients().values()])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


@pytest.mark.full
def test_compiled_steps_with_cut_hidden_units_are_the_same(pools: Pools) -> None:
    assert pools[2].run(compiled_units, Reader().double()) == [0.0, 0.0]


class ByChunks(nn.Module):
    """A ConvLSTM as it is mostly written: input and state side by side, one convolution, gates in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.head = nn.Conv2d(2 + 4, 16, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, time, _, *space = x.shape
        h = c = torch.zeros(samples, 4, *space, dtype=x.dtype, device=x.device)
        for t in range(time):
            i, f, o, g = torch.chunk(self.gates(torch.cat([x[:, t], h], dim=1)), 4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        made: torch.Tensor = self.head(h)
        return made


def steps_in_space() -> list[tuple[float, bool]]:
    """By strategy: how far results are from those of one process, and whether programs tell what is sent."""
    found, x = [], torch.randn(2, 3, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for strategy, mesh in {"spatial": Mesh(height=2), "filter": Mesh(filter=2), "channel": Mesh(channel=2)}.items():
        model, whole = ByChunks().double(), ByChunks().double()
        net = cm.parallelize(model, cm.plan(model, x, mesh, strategy), mesh=opened(mesh))
        whole.load_state_dict(net.full_state_dict())
        sent = step(net, x)
        expected = whole(x)
        expected.sum().backward()
        gradients = net.full_gradients()
        pairs = [(net.gather_output(net(net.shard_input(x))), expected)]
        pairs += [(gradients[name], p.grad) for name, p in whole.named_parameters()]
        found.append((max(float((a - b).detach().abs().max()) for a, b in pairs), sent == told(net.program) != {}))
    return found


def test_loops_over_time_written_out_are_exact(pools: Pools) -> None:
    for found in pools[2].run(steps_in_space):
        assert max(error for error, _ in found) < 1e-12
        assert all(is_told for _, is_told in found)
