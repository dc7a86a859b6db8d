"""Strategies on meshes: the candidates, and why some are infeasible."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from convmesh.graph import Captured, capture
from convmesh.layout import Mesh
from convmesh.lowering.lower import lower
from convmesh.oracle.search.candidates import Candidate, Candidates, factorisations, unevenness
from convmesh.oracle.search.layer_splits import splits_of
from convmesh.planner.drafting import DraftOptions, draft
from convmesh.plans import split_nodes


def network() -> Captured:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )
    return capture(model, (8, 3, 32, 32))


@pytest.fixture(scope="module")
def candidates() -> Candidates:
    captured = network()
    return Candidates(captured.graph, lower(captured, draft(captured, Mesh(), "data", DraftOptions())).program)


def test_factorisations_are_all_products_once() -> None:
    found = [tuple(sizes.values()) for sizes in factorisations(12, ("data", "height", "width"))]
    assert len(found) == len({*found}) == 18
    assert all(math.prod(sizes) == 12 for sizes in found)


@pytest.mark.parametrize(
    ("strategy", "axes", "reason"),
    [
        ("data", {"data": 16}, "data: 16 ranks > 8 samples"),
        ("filter", {"filter": 64}, "filter: 64 ranks > 16 filters of 0"),
        ("filter", {"filter": 32}, "filter: 32 ranks > 16 filters of 0"),
        ("spatial", {"height": 32}, "height: 32 ranks of 2 rows > extent 32 of 0"),
        (
            "spatial",
            {"height": 16, "width": 16},
            "height: 16 ranks of 2 rows > extent 16 of 1, and too few samples and filters",
        ),
        ("pipeline", {"pipe": 8}, "pipe: 8 ranks > 3 stages"),
        ("hybrid", {"data": 8}, None),
        ("data", {"data": 8}, None),
        ("data+spatial", {"data": 8, "height": 4, "width": 4}, None),
    ],
)
def test_refusals_name_the_rule_and_the_layer(
    candidates: Candidates, strategy: str, axes: dict[str, int], reason: str | None
) -> None:
    refusal = candidates.refusal(Candidate(strategy, Mesh(**axes)))
    assert (None if refusal is None else str(refusal)) == reason


def test_strategies_of_two_parts_use_both_and_equal_extents_are_cut_from_the_outside(candidates: Candidates) -> None:
    meshes = [candidate.mesh for candidate in candidates.of("data+spatial", 8)]
    assert all("data" in mesh.axes and len(mesh.axes) > 1 for mesh in meshes)
    assert Mesh(data=2, height=4) in meshes
    assert Mesh(data=2, width=4) not in meshes


def test_uneven_shares_count() -> None:
    assert unevenness(Mesh(data=3), (8, 3, 32, 32)) == pytest.approx(9 / 8)
    assert unevenness(Mesh(data=2, width=5), (8, 3, 32, 32)) == pytest.approx(35 / 32)


def test_layers_may_take_what_every_axis_can_cut_and_no_axis_is_idle_that_could_work() -> None:
    graph = network().graph
    by_layer = {node.layer: splits_of(node, graph, Mesh(data=4, height=2)) for node in split_nodes(graph)}
    assert all(split.axes for splits in by_layer.values() for split in splits)
    assert str(by_layer["0"][0]) == "sample:data height:height"
    assert {str(split) for split in by_layer["5"]} >= {"sample:data*height", "sample:data channel:height(auto)"}
