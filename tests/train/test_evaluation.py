"""Metrics on a mesh are those of one process, with a last batch that is not full."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from convmesh import ConfigError, Mesh, parallelize, plan
from convmesh.testing import RankPool
from convmesh.train.evaluation import RSquared, evaluate, metric_names

Pools = dict[int, RankPool]
SAMPLES, BATCH = 7, 4


def values() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(144, 4)).double()
    return model, torch.randn(SAMPLES, 1, 6, 6).double(), torch.randn(SAMPLES, 4).double()


def judged(mesh: Mesh, strategy: str) -> dict[str, Any]:
    model, x, target = values()
    net = parallelize(model, plan(model, (BATCH, *x.shape[1:]), mesh, strategy), loss=F.mse_loss)
    starts = range(0, SAMPLES, BATCH)
    batches = ((net.shard_input(x[a : a + BATCH]), net.shard_target(target[a : a + BATCH])) for a in starts)
    found = evaluate(net, F.mse_loss, batches, ["r2"])
    assert net.training
    return found


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [(Mesh(data=2), "data"), (Mesh(height=2), "spatial"), (Mesh(filter=2), "filter"), (Mesh(data=4), "data")],
    ids=str,
)
def test_r2_of_every_output(mesh: Mesh, strategy: str, pools: Pools) -> None:
    model, x, target = values()
    with torch.no_grad():
        output = model(x)
    errors, spread = (output - target).square().sum(0), (target - target.mean(0)).square().sum(0)
    expected = 1 - errors / spread
    for found in pools[mesh.size].run(judged, mesh, strategy):
        assert found["loss"] == pytest.approx(F.mse_loss(output, target).item(), rel=1e-12)
        assert found["r2_outputs"] == pytest.approx(expected.tolist(), rel=1e-10)
        assert found["r2"] == min(found["r2_outputs"])


def test_targets_that_are_all_alike_have_no_r2() -> None:
    sums = torch.tensor([[1.0, 1.0], [8.0, 2.0], [16.0, 3.0], [4.0, 4.0]])
    assert RSquared()._result(sums) == {"r2": 0.5, "r2_outputs": [None, 0.5]}


@pytest.mark.parametrize(
    ("name", "target"), [("r2", torch.int64), ("accuracy", torch.float32), ("dice", torch.float32)]
)
def test_a_metric_for_other_targets_is_refused(name: str, target: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=f"`evaluation.metrics` has '{name}', which is for .*or 'auto'"):
        metric_names((name,), target, 1)


def test_the_target_decides_the_metric() -> None:
    assert metric_names(("auto",), torch.float32, 1) == ("r2",)
    assert metric_names(("auto",), torch.int64, 0) == ("accuracy",)
    assert metric_names(("auto", "accuracy"), torch.int64, 3) == ("dice", "accuracy")
