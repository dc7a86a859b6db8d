"""A label that is no class, on one rank alone too, ends in one error on every rank."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import LabelError, Mesh
from convmesh.ops import dice_loss
from convmesh.ops.loss.labels import replaced_labels
from convmesh.plans import strategy_for
from convmesh.testing import opened
from tests.conftest import Pools

SHAPE = (4, 3, 8, 8)
CLASSES = 3
WEIGHTS = torch.tensor([1.0, 2.0, 3.0])

LOSSES: dict[str, Callable[..., Any]] = {
    "cross_entropy": F.cross_entropy,
    "weighted": nn.CrossEntropyLoss(WEIGHTS, ignore_index=2),
    "sum": functools.partial(F.cross_entropy, reduction="sum"),
    "unreduced": lambda y, t: F.cross_entropy(y, t, reduction="none").mean(),
    "nll_loss": lambda y, t: F.nll_loss(F.log_softmax(y, 1), t),
    "dice": lambda y, t: dice_loss(y, t, activation="softmax"),
    "dice, some ignored": lambda y, t: dice_loss(y, t, activation="softmax", batch=True, ignore_index=9),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, CLASSES, 1))


def step(mesh: Mesh, loss: str, label: int, ranks: list[int], check_loss: bool) -> str:
    """What a step says when `ranks` have a wrong label in their shard; before it, a step without."""
    whole = model()
    plan = cm.plan(whole, SHAPE, mesh, strategy_for(mesh))
    net = cm.parallelize(whole, plan, loss=LOSSES[loss], check_loss=check_loss)
    x, target = net.shard_input(torch.randn(SHAPE)), net.shard_target(torch.zeros(4, 8, 8, dtype=torch.int64))
    net(x, target).backward()
    if net.mesh.rank in ranks:
        target[-1, -1, -1] = label
    try:
        net(x, target)
    except LabelError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("label", [3, -1])
def test_every_loss(pools: Pools, loss: str, label: int) -> None:
    first, second = pools[2].run(step, Mesh(data=2), loss, label, [1], True)
    assert f"rank 1 has label {label}; labels of 3 classes must be from 0 to 2" in first
    assert second == first


@pytest.mark.parametrize("mesh", [Mesh(height=2), Mesh(filter=2), Mesh(pipe=2), Mesh(data=2, filter=2)], ids=str)
def test_every_strategy(pools: Pools, mesh: Mesh) -> None:
    """The last rank holds the last stage, or one of the copies of the labels."""
    found = pools[mesh.size].run(step, mesh, "weighted", 1000, [mesh.size - 1], False)
    assert f"rank {mesh.size - 1} has label 1000; labels of 3 classes" in found[0]
    assert "or ignore_index (=2)" in found[0]
    assert set(found) == {found[0]}


def test_all_ranks_are_named(pools: Pools) -> None:
    found = pools[2].run(step, Mesh(data=2), "cross_entropy", -7, [0, 1], True)
    assert "rank 0 has label -7" in found[0]
    assert "rank 1 has label -7" in found[0]


def test_ignored_labels_are_right(pools: Pools) -> None:
    assert pools[2].run(step, Mesh(data=2), "cross_entropy", -100, [1], True) == ["no error"] * 2
    assert pools[2].run(step, Mesh(data=2), "dice, some ignored", 9, [0], True) == ["no error"] * 2


def without_a_network(label: int) -> str:
    """On one rank's shard, on tensors alone."""
    mesh = opened(Mesh(height=2))
    x = cm.shard(torch.randn(SHAPE), mesh, {2: "height"})
    labels = torch.zeros(4, 4, 8, dtype=torch.int64)
    if mesh.rank == 0:
        labels[0, 0, 0] = label
    target = cm.from_local(labels, cm.Layout.of(mesh.mesh, (4, 8, 8), {1: "height"}), mesh)
    with pytest.raises(LabelError) as caught:
        F.cross_entropy(x, target)  # type: ignore[arg-type]
    with pytest.raises(LabelError, match="no class"):
        dice_loss(x, target)
    return str(caught.value)


def test_without_a_network(pools: Pools) -> None:
    first, second = pools[2].run(without_a_network, 5)
    assert "rank 0 has label 5; labels of 3 classes must be from 0 to 2, or ignore_index (=-100)" in first
    assert second == first


@pytest.mark.parametrize(
    ("values", "replaced", "problem"),
    [
        ([0, 2, -100], [0, 2, -100], None),
        ([0, 3, -100], [0, 0, -100], "label 3; labels of 3 classes must be from 0 to 2, or ignore_index (=-100)"),
        ([-1, 1, 7], [0, 1, 0], "label -1; labels of 3 classes"),
    ],
)
def test_labels_are_replaced_without_a_look(values: list[int], replaced: list[int], problem: str | None) -> None:
    """As a GPU has it, which nobody waits for."""
    found, poison, note = replaced_labels(torch.tensor(values), CLASSES, -100)
    assert found.tolist() == replaced
    assert bool(poison.isnan()) == (problem is not None)
    assert problem is None or problem in str(note.problem())


def test_plain_tensors() -> None:
    with pytest.raises(LabelError, match="label 4; labels of 3 classes"):
        dice_loss(torch.ones(2, 3, 4), torch.full((2, 4), 4))


def diverging() -> str:
    """A NaN of another cause stays what it was."""
    net = cm.parallelize(whole := model(), cm.plan(whole, SHAPE, Mesh(data=2), "data"), loss=F.cross_entropy)
    x, target = torch.full(SHAPE, torch.nan), torch.zeros(4, 8, 8, dtype=torch.int64)
    with pytest.raises(cm.NonFiniteLossError) as caught:
        net(net.shard_input(x), net.shard_target(target))
    return str(caught.value)


def test_other_nans_are_told_apart(pools: Pools) -> None:
    assert "the outputs of rank 0, 1 are not finite" in pools[2].run(diverging)[0]
