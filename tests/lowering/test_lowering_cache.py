"""Lowered plans are kept with the captured network, and made again when the network has changed."""

from collections.abc import Callable

import pytest
from torch import nn

import convmesh as cm
from convmesh.graph import Captured, capture
from convmesh.lowering import lower

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
