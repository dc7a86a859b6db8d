"""Exact plans verify as exact, for any network and mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import models
from convmesh.errors import UnsupportedError
from tests.verification.small_networks import Chain, TwoHeads, plan_for

SHAPE = (4, 3, 8, 8)


def test_every_layer_is_compared_and_the_model_is_left_alone() -> None:
    model = Chain()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = cm.verify(model, SHAPE, plan_for(model, SHAPE, data=2, height=2))
    assert result.ok, result
    assert result.first is None
    assert [check.layer for check in result.layers] == ["first", "pool", "relu", "second", "norm"]
    kinds = {check.layer: {difference.kind for difference in check.differences} for check in result.layers}
    assert kinds["first"] == {"output", "gradient", "weight gradient", "weight"}
    assert kinds["pool"] == {"output", "gradient"}
    assert result.worst is not None
    assert 0 < result.worst.error < 1e-9
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_several_inputs_and_outputs_shared_weights_dropout_and_recomputing() -> None:
    model, shapes = TwoHeads(), [(4, 2, 8, 8), (4, 1, 8, 8)]
    plan = cm.plan(
        model, [torch.zeros(s) for s in shapes], cm.Mesh(data=2, width=2), "data+spatial", checkpoint=["again"]
    )
    result = cm.verify(model, shapes, plan, steps=2)
    assert result.ok, result
    assert any("dropout" in note for note in result.notes)
    assert sum(check.layer == "again" for check in result.layers) == 2


def test_a_loss_and_its_target() -> None:
    small = models.find("lenet5").small()
    model = small.create()
    plan = plan_for(model, small.shape, filter=2)
    result = cm.verify(model, small.shape, plan, loss=F.cross_entropy, target=small.draw_target(), steps=2)
    assert result.ok, result
    assert len(result.losses) == 2


def test_compiled_steps_are_compared_by_losses_gradients_and_weights() -> None:
    model = Chain()
    plan = plan_for(model, SHAPE, height=2)
    with torch.no_grad():
        target = torch.zeros_like(model(torch.zeros(SHAPE)))
    result = cm.verify(model, SHAPE, plan, loss=F.mse_loss, target=target, steps=2, compile="eager")
    assert result.ok, result
    assert len(result.losses) == 2
    assert {d.kind for check in result.layers for d in check.differences} == {"weight gradient", "weight"}
    with pytest.raises(UnsupportedError, match="give `loss` and `target`"):
        cm.verify(model, SHAPE, plan, compile=True)


def looking(output: Any, target: Any) -> Any:
    """A loss that looks at its own value, as no graph can."""
    loss = F.mse_loss(output, target)
    return loss * 2 if loss.item() > 1e9 else loss


@pytest.mark.filterwarnings("ignore:`compile`")
def test_what_runs_eagerly_on_one_stage_is_no_proof_of_compiled_steps() -> None:
    model = Chain()
    plan = plan_for(model, SHAPE, pipe=2)
    with torch.no_grad():
        target = torch.zeros_like(model(torch.zeros(SHAPE)))
    with pytest.raises(UnsupportedError, match="cannot be verified: a stage cannot be traced"):
        cm.verify(model, SHAPE, plan, loss=looking, target=target, steps=1, compile="eager")


@pytest.mark.parametrize("compiling", [False, "eager"])
def test_a_pipeline_without_a_loss_is_given_one(compiling: bool | str) -> None:
    small = models.find("lenet5").small()
    model = small.create()
    result = cm.verify(model, small.shape, plan_for(model, small.shape, pipe=2), steps=2, compile=compiling)
    assert result.ok, result
    assert len(result.losses) == 2
    assert {d.kind for check in result.layers for d in check.differences} == {"weight gradient", "weight"}


def test_a_large_mesh_and_a_large_input_shrink_and_stay_cut() -> None:
    model, shape = Chain(), (64, 3, 256, 192)
    result = cm.verify(model, shape, plan_for(model, shape, data=32, height=8), most_ranks=4, steps=1)
    assert result.ok, result
    assert result.mesh == cm.Mesh(data=2, height=2)
    (small,) = result.shapes
    assert small[0] >= 2
    assert small[2] >= 4  # the pool halves them, and two ranks keep a row each
    assert small[2] < 256
    assert len(result.notes) == 2


def test_dense_layers_keep_their_extent() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 96 * 96, 2))
    result = cm.verify(model, (64, 1, 96, 96), plan_for(model, (64, 1, 96, 96), height=2), steps=1)
    assert result.ok, result
    assert result.shapes[0][2:] == (96, 96)
    assert result.shapes[0][0] < 64


def test_a_sample_of_zeros_hides_nothing() -> None:
    """Zeros would reduce every layer's output to its bias; random values are used instead."""
    model = Chain()
    sample = torch.zeros(SHAPE)
    result = cm.verify(model, sample, plan_for(model, sample, height=2), steps=1)
    assert result.ok, result
    assert result.worst is not None
    assert result.worst.error > 0


def test_frozen_layers_and_eval_mode() -> None:
    model = Chain().eval()
    model.first.requires_grad_(False)
    result = cm.verify(model, SHAPE, plan_for(model, SHAPE, height=2), steps=1)
    assert result.ok, result
    assert any("eval" in note for note in result.notes)


def test_a_plan_from_a_file(tmp_path: pytest.TempPathFactory) -> None:
    model = Chain()
    path = f"{tmp_path}/plan.toml"
    plan_for(model, SHAPE, data=2).save(path)
    assert cm.verify(model, SHAPE, cm.load_plan(path), steps=1).ok


def test_statistics_within_replicas_are_not_those_of_one_process() -> None:
    """The user asked for it, but it is still a difference, and is named."""
    model = Chain()
    plan = replace(plan_for(model, SHAPE, data=2), batchnorm="replica")
    result = cm.verify(model, SHAPE, plan, steps=1)
    assert not result.ok
    assert result.first is not None
    assert result.first.layer == "norm"
