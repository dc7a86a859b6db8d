"""Lowered plans are kept with the captured network, and made again when the network has changed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import convmesh as cm
from convmesh.graph import Captured, capture
from convmesh.lowering import lower
from convmesh.lowering.graph_walk import Lowering
from convmesh.lowering.lowering_cache import cache_of, share_dry_runs

SHAPE = (4, 2, 8, 8)


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())


def planned(captured: Captured) -> cm.Plan:
    return cm.plan(captured, SHAPE, cm.Mesh(height=2), "spatial")


def test_a_plan_is_lowered_once_for_a_rank() -> None:
    captured = capture(network(), SHAPE)
    plan = planned(captured)
    assert lower(captured, plan).program is lower(captured, plan).program
    assert lower(captured, plan, 1).program is not lower(captured, plan).program


@pytest.mark.parametrize("change", [{"reduction": "sharded"}, {"checkpoint": ("0",)}], ids=str)
def test_sums_and_recomputation_change_no_walk(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, mesh = network(), cm.Mesh(data=2)
    captured = capture(model, SHAPE)
    lower(captured, cm.plan(captured, SHAPE, mesh, "data"))
    plan = replace(cm.plan(captured, SHAPE, mesh, "data"), **change)
    alone = Lowering(capture(model, SHAPE), plan, 1).run().program
    walked = cm.plan(captured, SHAPE, mesh, "data")
    lower(captured, walked, 1)
    monkeypatch.setattr(Lowering, "run", None)
    assert lower(captured, plan, 1).program == alone


def test_captures_for_other_batches_share_dry_runs() -> None:
    model, (_, *sample) = network(), SHAPE
    first, other = capture(model, SHAPE), capture(model, (8, *sample))
    share_dry_runs(first, other)
    lower(first, planned(first))
    assert cache_of(first).dry_runs is cache_of(other).dry_runs
    fresh = capture(model, (8, *sample))
    plan = cm.plan(other, (8, *sample), cm.Mesh(height=2), "spatial")
    assert lower(other, plan).program == lower(fresh, plan).program


def evaluate(module: nn.Module) -> None:
    module.eval()


def freeze(module: nn.Module) -> None:
    module.requires_grad_(False)


def widen(module: nn.Module) -> None:
    module.double()


@pytest.mark.parametrize("change", [evaluate, freeze, widen])
def test_a_changed_network_is_lowered_again(change: Callable[[nn.Module], None]) -> None:
    captured = capture(network(), SHAPE)
    plan = planned(captured)
    before = lower(captured, plan).program
    change(captured.module)
    after = lower(captured, plan).program
    assert after != before
