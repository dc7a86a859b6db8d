"""Runs whose ranks train alone and hand in their weights: nothing is lost, nobody waits, and they learn."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import convmesh as cm
from convmesh.asynchronous.async_weights import AsyncWeights
from convmesh.asynchronous.claims import Claims
from convmesh.errors import ConfigError, ConvMeshError
from convmesh.private_torch.stores import default_store
from convmesh.testing import RankError, run_ranks
from tests.conftest import Pools
from tests.train.runs import config, lines, ran

RUN: dict[str, Any] = {
    "batch": 8,
    "epochs": 6,
    "sync": "async",
    "sync_every": 2,
    "model": {"name": "tests.train.runs:smooth"},
    "data": {"args": {"samples": 48}, "test_args": {"samples": 40, "seed": 0}},
    "plan": {"strategy": "data"},
}


def test_a_run_learns_as_a_synchronous_one_does(pools: Pools, tmp_path: Path) -> None:
    ours = pools[2].run(ran, RUN, str(tmp_path / "async"))
    theirs = pools[2].run(ran, {**RUN, "sync": "step"}, str(tmp_path / "step"))[0]
    first = lines(tmp_path / "async")[0]["loss"]
    assert ours[0]["steps"] == theirs["steps"] == 36
    assert ours[0]["eval"]["loss"] < first / 2
    assert ours[0]["eval"]["accuracy"] == pytest.approx(theirs["eval"]["accuracy"], abs=0.1)
    assert [line["step"] for line in lines(tmp_path / "async")] == [*range(1, 37)]
    assert ours[0]["ranks"] == 2
    assert ours[0]["mesh"] == {"data": 2}
    assert ours[0]["asynchronous"]["updates"] >= 36  # 72 batches, two a time at most
    assert not {*os.listdir(tmp_path / "step")} - {*os.listdir(tmp_path / "async")}


def test_a_run_goes_on_where_it_was(pools: Pools, tmp_path: Path) -> None:
    pools[2].run(ran, {**RUN, "steps": 12}, str(tmp_path))
    again = pools[2].run(ran, {**RUN, "steps": 20}, str(tmp_path), True)[0]
    assert again["steps"] == 20
    assert [line["step"] for line in lines(tmp_path)] == [*range(1, 21)]


def stopped(folder: str) -> Any:
    """The second rank is told to stop before it begins."""
    if dist.get_rank() == 1:
        os.environ["CONVMESH_TEST_STOPS"] = "1"
    try:
        return ran({**RUN, "epochs": 500, "loss": f"{__name__}:told_to_stop"}, folder)
    finally:
        os.environ.pop("CONVMESH_TEST_STOPS", None)


def told_to_stop(output: Any, target: Any) -> torch.Tensor:
    if os.environ.pop("CONVMESH_TEST_STOPS", ""):
        os.kill(os.getpid(), signal.SIGTERM)
    return cross_entropy(output, target)


def test_a_signal_to_any_rank_ends_the_run_saved(pools: Pools, tmp_path: Path) -> None:
    summary = pools[2].run(stopped, str(tmp_path))[0]
    assert summary["stopped_by_signal"] == signal.SIGTERM
    assert summary["steps"] < 3000
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == summary["steps"]
    assert cm.Checkpointer(tmp_path / "checkpoints").steps()[-1] == summary["steps"]


def failing(output: Any, target: Any) -> torch.Tensor:
    if dist.get_rank() == int(os.environ["CONVMESH_TEST_FAILS"]):
        raise ConfigError("no more")
    return cross_entropy(output, target)


def ended(folder: str, rank: int) -> str:
    os.environ["CONVMESH_TEST_FAILS"] = str(rank)
    with pytest.raises(ConvMeshError) as raised:
        ran({**RUN, "epochs": 5000, "loss": f"{__name__}:failing"}, folder)
    return str(raised.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_ends_all_with_its_reason(rank: int, tmp_path: Path) -> None:
    told = run_ranks(2, ended, str(tmp_path), rank)
    assert told[rank] == "no more"
    assert told[1 - rank] == f"rank {rank} failed: no more"


BATCHES, SLOWER = 60, 5


def take_long() -> None:
    """Be slower than others by what they do, whatever the clock says: until they have taken some batches, or all."""
    end = min(BATCHES, taken(0) + SLOWER)
    while taken(0) < end:
        time.sleep(1e-3)


def taken(more: int) -> int:
    return int(default_store().add("tests/batches taken", more))


def own_loop() -> tuple[int, list[float], int]:
    """Batches that a rank took; all but the first rank are slow."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # the first rank's weights count
    model = nn.Linear(4, 3)
    alone = cm.open_mesh(cm.Mesh(), ranks=[rank])
    net = cm.parallelize(model, cm.plan(model, (2, 4), cm.Mesh(), "data"), cross_entropy, mesh=alone)
    weights = AsyncWeights(net, cm.open_mesh(cm.Mesh(data=world)))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in (claims := Claims(0, BATCHES)):
        taken(1)
        draws = torch.Generator().manual_seed(number)
        net(torch.randn(2, 4, generator=draws), torch.tensor([0, 1])).backward()
        opt.step()
        opt.zero_grad()
        if rank:
            take_long()
        weights.submit(1.0)
    weights.finish()
    version = weights.weights.version if weights.weights is not None else 0
    return len(claims.taken), [p.sum().item() for p in net.parameters()], version


def test_a_slow_rank_takes_fewer_batches_and_every_batch_is_taken_once(pools: Pools) -> None:
    (fast, weights, version), (slow, weights_slow, _), (third, _, _) = pools[3].run(own_loop)
    assert fast + slow + third == version == BATCHES
    assert fast > slow
    assert weights == weights_slow


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"plan": {"strategy": "spatial"}}, r"needs `plan.strategy` = 'data'"),
        ({"plan": {"mesh": {"data": 1, "height": 2}}}, r"needs `plan.strategy` = 'data' and no other axis"),
        ({"accumulate": 2}, r"needs `accumulate` = 1 \(it is 2\)"),
        ({"plan": {"strategy": "data", "reduction": "sharded"}}, r"needs `plan.reduction` = 'bucketed'"),
        ({"balance": {"mode": "auto"}}, r"needs `balance.mode` = 'off'"),
        ({"profile_steps": 2}, r"needs `profile_steps` = 0"),
    ],
)
def test_what_needs_a_common_step_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config(**{**RUN, **changes})


def test_a_batch_has_a_sample_for_every_rank(pools: Pools, tmp_path: Path) -> None:
    assert pools[2].run(ran, {**RUN, "batch": 9, "steps": 5}, str(tmp_path / "odd"))[0]["steps"] == 5
    with pytest.raises(RankError, match=r"`batch` \(=1\) must be at least 2"):
        pools[2].run(ran, {**RUN, "batch": 1}, str(tmp_path / "one"))
