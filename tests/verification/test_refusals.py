"""What cannot be verified is refused before anything runs."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh.verification import draft_plan
from convmesh.verification import refusals as checks
from convmesh.verification import verifier as run
from tests.conftest import Pools
from tests.verification.small_networks import Chain, Strange, needs_fork, plan_for

SHAPE = (4, 3, 8, 8)


@needs_fork
def test_all_unsupported_layers_are_listed_and_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run_ranks", None)
    model = Strange()
    found = cm.verify(model, SHAPE, draft_plan(model, SHAPE, cm.Mesh(height=2), "spatial"))
    assert not found.ok
    assert [u.op for u in found.unsupported] == ["digamma", "lgamma"]
    assert all("split version" in u.reason for u in found.unsupported)
    assert found.layers == ()
    assert found.verdict.startswith("cannot run")


class Branching(nn.Module):
    """Its own forward branches, so that no part of it can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv(x)
        return y * 2 if y.mean() > 0 else y


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_nothing_can_look_into_is_told_the_line() -> None:
    model = Branching()
    found = cm.verify(model, SHAPE, draft_plan(model, SHAPE, cm.Mesh(data=2), "data"))
    (only,) = found.unsupported
    assert "return y * 2 if y.mean() > 0 else y): it branches" in only.reason
    assert "Move that line into an nn.Module of its own" in only.reason


def test_a_plan_for_another_network() -> None:
    plan = plan_for(Chain(), SHAPE, data=2)
    with pytest.raises(cm.PlanError, match="layer 'first', but the network has none"):
        cm.verify(nn.Sequential(nn.Conv2d(3, 4, 3)), SHAPE, plan)


def test_a_sample_of_another_shape() -> None:
    model = Chain()
    with pytest.raises(cm.ConvMeshError, match=r"\(4, 3, 8, 10\).*only the number of samples may differ"):
        cm.verify(model, (4, 3, 8, 10), plan_for(model, SHAPE, data=2))


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"steps": 0}, "`steps` \\(=0\\)"),
        ({"most_ranks": 0}, "`most_ranks` \\(=0\\)"),
        ({"loss": F.mse_loss}, "`loss` needs a `target`"),
    ],
)
def test_options(options: dict[str, Any], rule: str) -> None:
    model = Chain()
    with pytest.raises(cm.PlanError, match=rule):
        cm.verify(model, SHAPE, plan_for(model, SHAPE, data=2), **options)


def test_weights_without_values() -> None:
    with torch.device("meta"):
        model = Chain()
    with pytest.raises(cm.UnsupportedError, match="meta device"):
        cm.verify(model, SHAPE, plan_for(model, SHAPE, data=2))


@needs_fork
def test_a_model_that_memory_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_bytes_free", lambda: 1000)
    model = Chain()
    with pytest.raises(cm.UnsupportedError, match="GiB to train in float64 on 2 local ranks"):
        cm.verify(model, SHAPE, plan_for(model, SHAPE, data=2))


def loss_without_reduction(y: Any, target: Any) -> Any:
    return F.mse_loss(y, target, reduction="none")


@needs_fork
def test_a_loss_that_cannot_be_split_is_refused_as_in_training() -> None:
    model = Chain()
    plan = plan_for(model, SHAPE, data=2)
    target = torch.zeros(4, 6, 4, 4)
    found = cm.verify(model, SHAPE, plan, loss=loss_without_reduction, target=target, steps=1)
    assert "grad can be implicitly created only for scalar outputs" in found.failure


def verify_inside() -> str:
    model = Chain()
    with pytest.raises(cm.MeshError) as caught:
        cm.verify(model, SHAPE, plan_for(model, SHAPE, data=2))
    return str(caught.value)


def test_an_open_process_group_is_refused(pools: Pools) -> None:
    (message,) = pools[1].run(verify_inside)
    assert "process group is open" in message


def test_where_there_are_gpus_a_fresh_process_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process believes it has GPUs; the one it starts finds none."""
    model = Chain()
    plan = plan_for(model, SHAPE, data=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = {*multiprocessing.active_children()}
    assert cm.verify(model, SHAPE, plan, steps=1).ok
    with pytest.raises(cm.PlanError, match="has none"):
        cm.verify(nn.Sequential(nn.Conv2d(3, 4, 3)), SHAPE, plan)
    with pytest.raises(cm.UnsupportedError, match="process of its own"):
        cm.verify(model, SHAPE, plan, loss=lambda y, t: (y - t).sum(), target=torch.zeros(()))
    assert {*multiprocessing.active_children()} == before


def test_no_process_is_left() -> None:
    before = {*multiprocessing.active_children()}
    model = Chain()
    cm.verify(model, SHAPE, plan_for(model, SHAPE, data=2), steps=1)
    assert {*multiprocessing.active_children()} <= before
