"""Ranks of a group post the same transfers in the same order, for every strategy; a difference is named."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.errors import DisagreementError
from convmesh.graph import capture
from convmesh.lowering.lower import lower
from convmesh.plans import Program
from convmesh.plans.transfer_order import first_difference, transfer_order
from convmesh.testing import opened

from ..conftest import Pools

CASES = [
    (Mesh(data=3), "data"),
    (Mesh(data=3), "data sharded"),
    (Mesh(data=2, height=2), "data+spatial broadcast"),
    (Mesh(height=3), "spatial"),
    (Mesh(height=2, width=2), "spatial"),
    (Mesh(filter=3), "filter"),
    (Mesh(channel=2), "channel"),
    (Mesh(data=2, height=2), "data+spatial"),
    (Mesh(data=2), "hybrid"),
    (Mesh(data=2, pipe=2), "data+pipeline"),
]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 6, 5, padding=2),
        nn.Flatten(), nn.Linear(384, 8),
    )  # fmt: skip


@cache
def programs(mesh: Mesh, strategy: str) -> list[Program]:
    captured = capture(network(), (6, 3, 16, 16))
    name, _, reduction = strategy.partition(" ")
    options: Any = {"reduction": reduction} if reduction else {}
    plan = cm.plan(network(), (6, 3, 16, 16), mesh, name, **options)
    return [lower(captured, plan, rank).program for rank in range(mesh.size)]


@pytest.mark.parametrize(("mesh", "strategy"), CASES, ids=str)
def test_the_ranks_of_a_group_post_the_same(mesh: Mesh, strategy: str) -> None:
    orders = [transfer_order(program) for program in programs(mesh, strategy)]
    groups = {group for order in orders for group in order}
    assert groups
    for group in groups:
        assert first_difference(group, {rank: o[group] for rank, o in enumerate(orders) if group in o}) is None
    # Of what stages send each other only the senders' programs tell.
    assert "pipe" in mesh.axes or all(sum(group in order for order in orders) > 1 for group in groups)


def test_the_first_difference_is_named() -> None:
    lists = {0: ["a", "b", "c"], 2: ["a", "c"]}
    assert first_difference("layers of ranks 0, 2", lists) == (
        "transfer 1 of the layers of ranks 0, 2 is b on rank 0, but c on rank 2"
    )


def differing() -> str:
    """Rank 1 forgets a layer."""
    mesh = opened(Mesh(height=2))
    plan = cm.plan(network(), (6, 3, 16, 16), Mesh(height=2), "spatial")
    program = lower(capture(network(), (6, 3, 16, 16)), plan, mesh.rank).program
    program = replace(program, nodes=program.nodes[:-3]) if mesh.rank else program
    with pytest.raises(DisagreementError) as caught:
        mesh.agree_on_lists("the program's transfers", transfer_order(program), first_difference)
    return str(caught.value)


def test_ranks_with_different_programs_are_told_on_every_rank(pools: Pools) -> None:
    first, second = pools[2].run(differing)
    assert first == second
    assert first.startswith("the program's transfers: transfer ")
    assert "on rank 0, but" in first
