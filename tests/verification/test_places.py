"""Where a verification's ranks run: on GPUs they are started by a process of their own, and compute in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import convmesh as cm
from convmesh import models
from convmesh.cli.main import main
from convmesh.errors import UnsupportedError
from convmesh.ops.core.sharded import Sharded
from convmesh.verification.rank_place import SINGLE, RankPlace
from convmesh.verification.verifier import _Job, _silent, _twin
from tests.verification.small_networks import Chain, plan_for

SHAPE = (4, 3, 8, 8)
AS_ON_GPUS = RankPlace("cpu", torch.float32, 0, {})


@pytest.mark.parametrize("axes", [{"data": 2}, {"pipe": 2}], ids=str)
def test_ranks_of_another_process_compute_in_float32(axes: dict[str, int]) -> None:
    small = models.find("lenet5").small()
    model, target = small.create(), small.draw_target()
    plan = plan_for(model, small.shape, **axes)
    job = _Job((small.shape,), plan, F.cross_entropy, target, 2, 120.0, "eager", AS_ON_GPUS, _silent)
    result = job.run(_twin(model), 8)
    assert result.ok, result
    assert any("in float32, without TF32" in note for note in result.notes)
    assert result.worst is not None
    assert 1e-10 < result.worst.error < 1e-3
    assert all(SINGLE.tolerance <= d.allowed < 1e-2 for check in result.layers for d in check.differences)


def wrong(output: Any, target: Any) -> Any:
    """A loss that is another one where it is split."""
    return F.mse_loss(output, target) * (1.001 if isinstance(output, Sharded) else 1.0)


def test_float32_hides_no_mistake() -> None:
    model = Chain()
    with torch.no_grad():
        target = torch.zeros_like(model(torch.zeros(SHAPE)))
    job = _Job((SHAPE,), plan_for(model, SHAPE, data=2), wrong, target, 1, 120.0, False, AS_ON_GPUS, _silent)
    result = job.run(_twin(model), 8)
    assert not result.ok
    assert result.first is not None
    assert result.first.layer == "loss"


def test_a_place_must_exist(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain()
    plan = plan_for(model, SHAPE, data=2)
    with pytest.raises(UnsupportedError, match=r"`device` \(='tpu'\) must be 'cpu' or 'cuda'"):
        cm.verify(model, SHAPE, plan, device="tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="needs a GPU, and torch sees none here; use device='cpu'"):
        cm.verify(model, SHAPE, plan, device="cuda")
    assert main(["verify", "lenet5", "--ranks", "2", "--small", "--device", "cuda"]) == 2
    told = capsys.readouterr().err
    assert "`device` (='cuda') needs a GPU" in told
    assert "Traceback" not in told
