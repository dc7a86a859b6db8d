"""Broken layers are named: split operators are broken on purpose, only in the forked ranks."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh.errors import CaptureError
from convmesh.ops import Sharded
from convmesh.ops.core import registry
from convmesh.verification import Verification
from convmesh.verification.undecided_plan import draft_plan
from tests.verification.small_networks import Chain, Counting, needs_fork, plan_for

pytestmark = needs_fork

SHAPE = (4, 3, 8, 8)

Change = Callable[[Sharded], Sharded]


def broken_pool(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Apply `change` to the average pool's output on the last rank of a real mesh."""
    pool = registry.handler_of(F.avg_pool2d)

    def broken(*args: Any, **kwargs: Any) -> Sharded:
        y: Sharded = pool(*args, **kwargs)
        is_last = not y.mesh.is_dry and y.mesh.rank == y.mesh.mesh.size - 1
        return change(y) if is_last else y

    monkeypatch.setitem(registry._handlers, F.avg_pool2d, broken)


def verified(**options: Any) -> Verification:
    model = Chain()
    return cm.verify(model, SHAPE, plan_for(model, SHAPE, height=2), **options)


def test_a_wrong_output_names_its_layer_rank_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    broken_pool(monkeypatch, lambda y: y + 1e-6)
    result = verified(steps=1)
    assert not result.ok
    assert result.first is not None
    assert result.first.layer == "pool"
    pool = next(check for check in result.layers if check.layer == "pool")
    output = next(one for one in pool.differences if one.kind == "output")
    assert output.rank == 1  # gradients behind it are off too, by some weights more than it is
    assert 1e-7 < output.error < 1e-5
    before = next(check for check in result.layers if check.layer == "first").largest("output")
    assert before is not None
    assert before < 1e-12
    assert "layer 'pool'" in str(result)


class _Amplified(torch.autograd.Function):
    """The identity with a gradient that is a little too large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return grad * (1 + 1e-6)


def test_a_wrong_backward_names_the_layer_of_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = registry.handler_of(F.avg_pool2d)

    def broken(x: Sharded, *args: Any, **kwargs: Any) -> Any:
        return pool(x if x.mesh.is_dry else x.like(_Amplified.apply(x.local)), *args, **kwargs)

    monkeypatch.setitem(registry._handlers, F.avg_pool2d, broken)
    found = verified(steps=1)
    assert found.first is not None
    assert found.first.layer == "pool"
    assert "backward" in found.first.what


def test_a_gradient_that_is_not_summed_names_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["convmesh.runtime.build"]
    lower = module.lower

    def forgetful(*args: Any, **options: Any) -> Any:
        lowered = lower(*args, **options)
        return dataclasses.replace(lowered, sum_axes={**lowered.sum_axes, "second.weight": ()})

    monkeypatch.setattr(module, "lower", forgetful)
    found = verified(steps=1)
    assert found.first is not None
    assert found.first.layer == "second"
    assert "gradient of second.weight" in found.first.what


def test_a_fault_in_a_later_step_shows_in_losses_and_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))
    broken_pool(monkeypatch, lambda y: y + 1e-3 if next(calls) == 1 else y)
    found = verified(steps=3, loss=F.mse_loss, target=lambda shape: torch.ones(shape[0], 6, 4, 4))
    assert all(d.ok for check in found.layers for d in check.differences if d.kind != "weight")
    assert [loss.ok for loss in found.losses] == [True, False, False]
    assert not found.ok


def test_a_layer_that_raises_on_one_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(y: Sharded) -> Sharded:
        raise RuntimeError("out of cheese")

    broken_pool(monkeypatch, fail)
    found = verified(steps=1)
    expected = "rank 1, layer 'pool': OperatorRuntimeError: `avg_pool2d` on Sharded(4, 4, 8, 8): out of cheese."
    assert found.failure.startswith(expected)
    assert not found.ok


def test_a_rank_that_hangs_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(y: Sharded) -> Sharded:
        signal.pause()
        return y

    broken_pool(monkeypatch, hang)
    found = verified(steps=1, seconds_timeout=8)
    assert "rank 1" in found.failure
    assert not found.ok


def test_a_model_that_differs_from_its_capture_is_reported() -> None:
    model = Counting()
    with pytest.raises(CaptureError, match="something else each time"):
        plan_for(model, SHAPE, data=2)
    found = cm.verify(model, SHAPE, draft_plan(model, SHAPE, cm.Mesh(data=2)), steps=1)
    assert "computes something else each time" in found.failure
    assert not found.ok


def test_non_finite_numbers_are_reported() -> None:
    model = nn.Sequential(conv := nn.Conv2d(3, 2, 1), nn.Hardtanh())
    conv.weight.data.fill_(float("nan"))
    found = cm.verify(model, SHAPE, plan_for(model, SHAPE, data=2), steps=1)
    assert "not a number" in found.failure
