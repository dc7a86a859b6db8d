"""Every reference network under every preset: optimiser steps match a single process's losses and weights.

Each run takes a sample of the combinations; `make test-full` takes all of them.
"""

import pytest

from convmesh import Mesh, models
from tests.conftest import Pools
from tests.runtime.training import References, assert_same, train_split

GRIDS: dict[str, list[dict[str, int]]] = {
    "data": [{"data": 2}, {"data": 4}, {"data": 8}],
    "spatial": [{"height": 2}, {"height": 2, "width": 2}, {"depth": 2, "height": 2, "width": 2}],
    "filter": [{"filter": 2}, {"filter": 4}, {"filter": 8}],
    "channel": [{"channel": 2}, {"channel": 4}, {"channel": 8}],
    "hybrid": [{"data": 2}, {"data": 4}],
    "data+spatial": [{"data": 2, "height": 2}, {"data": 2, "height": 2, "width": 2}],
    "data+filter": [{"data": 2, "filter": 2}, {"data": 2, "filter": 4}],
    "data+channel": [{"data": 2, "channel": 2}, {"data": 4, "channel": 2}],
}
LIGHT = "lenet5"
"""The network whose steps cost least: every preset is tried with it on its largest mesh in each run."""


HEAVY = ("deepcam", "densenet121", "inception3", "mobilenet-v2", "resnet50", "vnet")
"""Networks whose steps cost most: a run takes them on two ranks."""


DEEPER = ("resnet152", "wide-resnet", "cosmoflow-256", "cosmoflow-512", "meshnet-2k")
"""Networks that are another one with more of the same layers, or wider: only `make test-full` takes them."""


def is_sampled(name: str, strategy: str, axes: dict[str, int]) -> bool:
    """Each run takes every network once, presets in turn on their smallest mesh, and every preset on its largest."""
    if name == LIGHT:
        return axes == GRIDS[strategy][-1]
    if name in DEEPER:
        return False
    presets = [preset for preset in GRIDS if name not in HEAVY or Mesh(**GRIDS[preset][0]).size == 2]
    turn = models.names().index(name) % len(presets)
    return strategy == presets[turn] and axes == GRIDS[strategy][0]


def combinations() -> list[object]:
    listed = [(name, strategy, axes) for name in models.names() for strategy in GRIDS for axes in GRIDS[strategy]]
    return [
        pytest.param(
            *combination,
            id="-".join((combination[0], combination[1], "x".join(map(str, combination[2].values())))),
            marks=[] if is_sampled(*combination) else pytest.mark.full,
        )
        for combination in listed
    ]


@pytest.fixture(scope="module")
def references(pools: Pools) -> References:
    return References(pools[1])


@pytest.mark.parametrize(("name", "strategy", "axes"), combinations())
def test_steps_are_those_of_one_process(
    pools: Pools, references: References, name: str, strategy: str, axes: dict[str, int]
) -> None:
    mesh = Mesh(**axes)
    assert_same(pools[mesh.size].run(train_split, name, mesh, strategy), references[name])


def test_every_network_and_every_preset_is_in_the_sample() -> None:
    sample = [p.values for p in combinations() if not p.marks]  # type: ignore[attr-defined]
    assert {strategy for _, strategy, _ in sample} == {*GRIDS}
    assert {Mesh(**axes).size for _, _, axes in sample} == {2, 4, 8}
    assert {name for name, _, _ in sample} == {*models.names()} - {*DEEPER}
