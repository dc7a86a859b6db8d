"""Transformers: search finds Megatron's tensor parallelism, and its sequence parallelism where that is cheaper."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.graph import capture
from convmesh.lowering import lower
from convmesh.models.transformer import TransformerBlock
from convmesh.plans import Plan, Transfer
from convmesh.system import System

FEATURES, RANKS, BLOCKS = 1024, 4, 2
MESH = Mesh(filter=RANKS)
COLUMNS, ROWS = ("attention.qkv", "fc1"), ("attention.proj", "fc2")


def body(features: int, heads: int = 8) -> nn.Module:
    return nn.Sequential(*(TransformerBlock(features, heads, is_causal=True) for _ in range(BLOCKS)))


def found(tokens: int, mesh: Mesh = MESH) -> Plan:
    """The best plan for few samples of many features, whose weights cost more than their tokens."""
    with torch.device("meta"):
        captured = capture(body(FEATURES), (1, tokens, FEATURES), check=False)
    return cm.plan(captured, (1, tokens, FEATURES), mesh, "auto", system="dgx-a100")


@pytest.fixture(scope="module")
def few() -> Plan:
    return found(64)


@pytest.fixture(scope="module")
def many() -> Plan:
    return found(4096)


def transfers(plan: Plan) -> dict[str, Counter[tuple[str, str, int]]]:
    """By phase: the layer, carrier and bytes of each transfer."""
    nodes = lower(plan.source, plan).program.nodes
    return {
        phase: Counter((n.layer, s.carrier, s.bytes_sent) for n in nodes for s in steps(n) if isinstance(s, Transfer))
        for phase, steps in {"forward": lambda n: n.forward, "backward": lambda n: n.backward}.items()
    }


def layers(names: tuple[str, ...]) -> list[str]:
    return [f"{block}.{name}" for block in range(BLOCKS) for name in names]


def test_columns_then_rows_with_two_sums_each_way(few: Plan) -> None:
    """Shoeybi et al., "Megatron-LM", 2019, figures 3 and 4: f and g, once for attention and once for the perceptron."""
    assert {few.split(name).algorithm for name in layers(COLUMNS)} == {"y"}
    assert {(few.split(name).algorithm, few.split(name).sums) for name in layers(ROWS)} == {("x", "whole")}
    bytes_sum = 2 * (RANKS - 1) * 64 * FEATURES * 4 // RANKS
    assert transfers(few) == {
        "forward": Counter((name, "all_reduce", bytes_sum) for name in layers(ROWS)),
        "backward": Counter((name, "all_reduce", bytes_sum) for name in layers(COLUMNS)),
    }


def test_an_axis_of_tokens_cuts_weights_where_they_cost_more() -> None:
    plan = found(64, Mesh(width=RANKS))
    assert {str(plan.split(name)) for name in layers(COLUMNS)} == {"channel:width(y)"}
    assert {str(plan.split(name)) for name in layers(ROWS)} == {"channel:width(x, sums whole)"}


def test_every_rank_has_whole_heads_and_its_part_of_all_weights(few: Plan) -> None:
    program = lower(few.source, few).program
    attention = next(node for node in program.nodes if node.layer.endswith("scaled_dot_product_attention"))
    assert [layout.cuts[1].axes for layout in attention.outputs] == [("filter",)]
    shapes = {weight.name: weight.local_shape for weight in program.weights}
    part = FEATURES // RANKS
    assert shapes["0.attention.qkv.weight"] == (3 * part, FEATURES)
    assert shapes["0.attention.proj.weight"] == (FEATURES, part)
    assert shapes["0.fc1.weight"] == (4 * part, FEATURES)
    assert shapes["0.fc2.weight"] == (FEATURES, 4 * part)


def test_sums_of_many_tokens_are_scattered_over_them(many: Plan) -> None:
    """Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, figure 5: norms and
    sums run on parts of the tokens, which the next layer gathers."""
    assert {many.split(name).algorithm for name in layers(COLUMNS)} == {"y"}
    assert {(many.split(name).algorithm, many.split(name).sums) for name in layers(ROWS)} == {("x", "token")}
    norm = next(node for node in lower(many.source, many).program.nodes if node.layer == "0.norm2")
    assert [layout.cuts[1].axes for layout in norm.outputs] == [("filter",)]
    sent: Counter[str] = Counter()
    for (layer, _, size), times in transfers(many)["forward"].items():
        sent[layer] += size * times
    part = 4096 * FEATURES * 4 // RANKS
    rest = layers(COLUMNS)[1:]  # the network's input is whole
    assert sent == Counter(dict.fromkeys([*layers(ROWS), *rest], (RANKS - 1) * part))


@pytest.mark.parametrize("pattern", ["few", "many"])
def test_what_search_finds_trains_exactly(pattern: str, request: pytest.FixtureRequest) -> None:
    plan: Plan = request.getfixturevalue(pattern)
    model, shape = body(16), (2, 6, 16)
    splits: dict[str, Any] = dict(plan.splits)
    verified = cm.verify(model, shape, cm.plan(model, shape, MESH, splits), steps=2)
    assert verified.ok, str(verified)


def test_keys_pass_round_where_gathered_ones_would_not_fit() -> None:
    """Gathering sends less, but every rank has all keys and values until backward is done with them."""
    shape, mesh = (1, 1 << 14, 512), Mesh(width=4)
    with torch.device("meta"):
        model = nn.Sequential(*(TransformerBlock(512, 8) for _ in range(BLOCKS))).bfloat16()
        captured = capture(model, torch.empty(shape, dtype=torch.bfloat16), check=False)
    system = System.load("dgx-a100")
    ways = [cm.plan(captured, shape, mesh, "spatial", attention=way) for way in ("gather", "ring")]
    gathered, passed = (cm.predict(plan, system).bytes_needed for plan in ways)
    assert passed < gathered
    fits = replace(system.device.bytes_memory, value=float((gathered + passed) // 2))
    small = replace(system, device=replace(system.device, bytes_memory=fits))
    assert [('attention = "ring"' in str(plan)) for plan in ways] == [False, True]
    assert cm.plan(captured, shape, mesh, "auto", system=system).attention == "gather"
    assert cm.plan(captured, shape, mesh, "auto", system=small).attention == "ring"


@pytest.mark.parametrize("mesh", [Mesh(width=2), Mesh(data=2, width=2)], ids=str)
def test_plans_with_rings_train_exactly(mesh: Mesh) -> None:
    model, shape = body(16), (2, 7, 16)
    strategy = "data+spatial" if "data" in mesh.axes else "spatial"
    verified = cm.verify(model, shape, cm.plan(model, shape, mesh, strategy, attention="ring"), steps=2)
    assert verified.ok, str(verified)
