"""Projections of published Transformers: each rank has its heads' part of all weights, and an input travels once."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.lowering import lower
from convmesh.lowering.lowered import Lowered
from convmesh.plans import Plan, Transfer
from tests.conftest import Pools
from tests.lowering.test_program_traffic import ByAxes, step, told

FEATURES, HEADS, SHAPE = 16, 4, (2, 5, 16)
STRATEGIES = [("filter", Mesh(filter=2)), ("channel", Mesh(channel=2))]


class Perceptron(nn.Module):
    """Behind attention, with a gate beside its first layer or without."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 3 * FEATURES)
        self.gate = nn.Linear(FEATURES, 3 * FEATURES) if gated else None
        self.down = nn.Linear(3 * FEATURES, FEATURES)

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        made = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.down(made)


class Separate(nn.Module):
    """Queries, keys and values each by a layer of its own, keys and values of fewer heads: as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.o = (
            nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES),
        )  # fmt: skip
        self.k, self.v = nn.Linear(FEATURES, FEATURES // 2), nn.Linear(FEATURES, FEATURES // 2)
        self.perceptron = Perceptron(gated=True)

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        q, k, v = (made.unflatten(-1, (-1, 4)).transpose(1, 2) for made in (self.q(y), self.k(y), self.v(y)))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.perceptron(x + self.o(seen.transpose(1, 2).flatten(2)))


class Fused(nn.Module):
    """torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(FEATURES), nn.MultiheadAttention(FEATURES, HEADS, batch_first=True)
        self.perceptron = Perceptron(gated=False)

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        return self.perceptron(x + self.attend(y, y, y, need_weights=False)[0])


class Functions(nn.Module):
    """Weights that are given to functions, without modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bias = nn.Parameter(torch.randn(24, FEATURES) / 4), nn.Parameter(torch.randn(24))
        self.last = nn.Parameter(torch.randn(FEATURES, 24) / 5)

    def forward(self, x: Any) -> Any:
        return x + F.linear(F.gelu(F.linear(x, self.first, self.bias)), self.last)


NETWORKS = {"separate": Separate, "fused": Fused, "functions": Functions}


def network(name: str, blocks: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(NETWORKS[name]() for _ in range(blocks)))


def planned(model: nn.Module, mesh: Mesh, strategy: str | dict[str, Any]) -> tuple[Plan, Lowered]:
    plan = cm.plan(model, SHAPE, mesh, strategy)
    return plan, lower(plan.source, plan)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("strategy", "mesh"), STRATEGIES)
def test_every_matrix_is_halved(name: str, strategy: str, mesh: Mesh) -> None:
    _, lowered = planned(network(name), mesh, strategy)
    matrices = [weight for weight in lowered.program.weights if len(weight.shape) == 2]
    assert matrices
    for weight in matrices:
        assert 2 * torch.Size(weight.local_shape).numel() == torch.Size(weight.shape).numel(), weight.name


@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_is_moved_between_columns_and_rows(name: str) -> None:
    """An input is gathered before its projections and sums are scattered behind the last; its gradient likewise."""
    _, lowered = planned(network(name), Mesh(filter=2), "filter")
    part = 2 * 5 * FEATURES * 4 // 2  # of a tensor of tokens
    sent: Counter[str] = Counter()
    for node in lowered.program.nodes:
        sent[node.kind] += sum(s.bytes_sent for s in (*node.forward, *node.backward) if isinstance(s, Transfer))
    pairs = 3 / 2 if name == "functions" else 4  # the network's input needs no gradient
    assert {kind for kind, size in sent.items() if size} <= {"linear", "layernorm"}
    assert sent["linear"] == 4 * pairs * part


FEW = [("separate", "data+channel", Mesh(data=2, channel=2)), ("fused", "filter", Mesh(filter=2))]
MANY = [(name, strategy, mesh) for name in NETWORKS for strategy, mesh in (*STRATEGIES, ("spatial", Mesh(width=2)))]


@pytest.mark.parametrize(
    ("name", "strategy", "mesh"), [*FEW, *(pytest.param(*each, marks=pytest.mark.full) for each in MANY)], ids=str
)
def test_it_is_exact(name: str, strategy: str, mesh: Mesh) -> None:
    model = network(name)
    verified = cm.verify(model, SHAPE, cm.plan(model, SHAPE, mesh, strategy), steps=1)
    assert verified.ok, str(verified)


def test_sums_to_tokens_and_whole_are_exact() -> None:
    """Megatron's patterns, with functions in place of layers: they take sums wherever a plan wants them."""
    model = network("functions")
    for sums in ("token", "whole"):
        rows = {"channel": "filter", "algorithm": "x", "sums": sums}
        splits = {"*": {"channel": "filter", "algorithm": "y"}, "*.linear_1": rows}
        assert cm.verify(model, SHAPE, cm.plan(model, SHAPE, Mesh(filter=2), splits), steps=1).ok


def sent_here(name: str) -> tuple[ByAxes, ByAxes]:
    model = network(name).double()
    x = torch.randn(SHAPE, dtype=torch.float64)
    net = cm.parallelize(model, cm.plan(model, SHAPE, Mesh(filter=2), "filter"))
    return step(net, x), told(net.program)


@pytest.mark.parametrize("name", ["separate", "fused"])
def test_what_is_sent_is_what_the_program_says(pools: Pools, name: str) -> None:
    for sent, program in pools[2].run(sent_here, name):
        assert sent == program
        assert sent


class Pixels(nn.Module):
    """Two projections of the pixels of an image, which lie in memory channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, FEATURES, 3, padding=1)
        self.q, self.k = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Any) -> Any:
        tokens = self.image(x).flatten(2).transpose(1, 2)
        return self.q(tokens) * self.k(tokens)


def test_an_input_that_lies_otherwise_in_memory_serves_two_projections() -> None:
    model, shape = Pixels(), (2, 3, 4, 4)
    verified = cm.verify(model, shape, cm.plan(model, shape, Mesh(filter=2), "filter"), steps=1)
    assert verified.ok, str(verified)
