"""A rank that is slower than the others gets less to do while a run goes on, and the run's numbers stay the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.errors import ConfigError
from tests.balance.slow_ranks import cores_of_their_own, ran_alone, slowed_loss, spin
from tests.conftest import Pools
from tests.train.runs import lines, losses, ran

RUN: dict[str, Any] = {
    "batch": 16,
    "epochs": 8,
    "loss": "tests.balance.slow_ranks:slowed_loss",
    "data": {"args": {"samples": 64}, "store_gib": 0.001},
    "evaluation": {"every_epochs": 4},
}


def is_near_three_to_one(shares: tuple[int, ...]) -> bool:
    """Not all of a step grows with a rank's share."""
    return 0.55 < shares[0] / sum(shares) < 0.9


def test_a_run_moves_samples_to_the_faster_rank(pools: Pools, tmp_path: Path) -> None:
    summary = pools[2].run(ran_alone, {**RUN, "balance": {"mode": "auto"}}, str(tmp_path / "two"))[0]
    pools[1].run(ran, RUN, str(tmp_path / "one"))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
    judged = [[line["eval"]["loss"] for line in lines(tmp_path / run) if "eval" in line] for run in ("one", "two")]
    assert judged[1] == pytest.approx(judged[0], rel=1e-9)
    assert summary["balance"]["moves"] >= 1
    assert is_near_three_to_one(summary["balance"]["shares"]["data"])
    told = [line["shares"]["data"] for line in lines(tmp_path / "two") if "shares" in line]
    assert tuple(told[-1]) == summary["balance"]["shares"]["data"]
    events = [json.loads(line) for line in (tmp_path / "two" / "events.jsonl").read_text().splitlines()]
    balanced = [event for event in events if event["kind"] == "balanced"]
    assert "shares: data 8:8 -> " in balanced[0]["what"]
    assert balanced[0]["what"] in (tmp_path / "two" / "log.txt").read_text()


def test_a_resumed_run_starts_from_equal_shares(pools: Pools, tmp_path: Path) -> None:
    tables = {**RUN, "balance": {"mode": "auto"}}
    first = pools[2].run(ran_alone, {**tables, "steps": 24}, str(tmp_path))[0]
    assert first["balance"]["shares"]["data"] != (8, 8)
    again = pools[2].run(ran_alone, {**tables, "steps": 25}, str(tmp_path), True)[0]
    assert again["balance"] == {"moves": 0, "shares": {"data": (8, 8)}}


def own_loop(axes: dict[str, int]) -> Any:
    """A user's own loop; the shares in the end, and this rank's last shard."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 3, 3, padding=1))
    x = torch.randn(16, 1, 16, 16)
    target = (x[:, 0] > 0).long()
    net = cm.parallelize(model, cm.plan(model, x, Mesh(**axes), "data+spatial"), slowed_loss)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    with cores_of_their_own():
        balancer = cm.Balancer(net, every=5)
    for _ in range(24):
        with balancer.step():
            net(net.shard_input(x), net.shard_target(target)).backward()
            opt.step()
            opt.zero_grad()
    return balancer.shares, net.shard_input(x).shape[2], [move.text for move in balancer.moves]


def test_a_slow_rank_of_a_spatial_group_gets_a_thinner_slab(pools: Pools) -> None:
    (shares, rows, texts), (_, rows_slow, _) = pools[2].run(own_loop, {"height": 2})
    assert is_near_three_to_one(shares["height"])
    assert rows + rows_slow == 16
    assert rows > rows_slow
    assert "ranks were busy for" in texts[0]


def steps_until_a_move(full: int) -> int:
    """How many steps it takes, after `full` of them at equal speed, until a rank that became slow has less to do."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), torch.randn(16, 1, 2, 2)
    net = cm.parallelize(model, cm.plan(model, x, Mesh(data=2), "data"), nn.functional.mse_loss)
    with cores_of_their_own():
        balancer = cm.Balancer(net)
    for step in range(full + 12):
        factor = 3 if step >= full and net.mesh.rank == 1 else 1
        with balancer.step():
            spin(factor * 8e-3)
            net(net.shard_input(x), net.shard_target(torch.zeros(16, 2))).backward()
        if balancer.moves:
            break
    return balancer.moves[0].step - full


def test_a_rank_that_becomes_slow_is_relieved_after_a_few_steps_at_any_time(pools: Pools) -> None:
    taken = [pools[2].run(steps_until_a_move, full) for full in range(8, 13)]  # a decision comes after the 8th
    assert all(first == second for first, second in taken)
    assert max(first for first, _ in taken) <= 5


def moves_in_a_restless_run(steps: int) -> list[int]:
    """The steps after which shares moved, if now one rank is slow and now the other."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), torch.randn(16, 1, 2, 2)
    net = cm.parallelize(model, cm.plan(model, x, Mesh(data=2), "data"), nn.functional.mse_loss)
    with cores_of_their_own():
        balancer = cm.Balancer(net)
    for step in range(steps):
        with balancer.step():
            spin(4e-3 * (3 if step // 8 % 2 == net.mesh.rank else 1))
            net(net.shard_input(x), net.shard_target(torch.zeros(16, 2))).backward()
    return [move.step for move in balancer.moves]


def test_shares_that_go_to_and_fro_move_less_and_less_often(pools: Pools) -> None:
    moves, others = pools[2].run(moves_in_a_restless_run, 120)
    assert moves == others
    assert 2 <= len(moves) <= 6  # of fifteen changes of the slow rank


def test_one_rank_has_nothing_to_balance(pools: Pools) -> None:
    assert pools[1].run(own_loop, {})[0][0] == {}


def piped() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1))
    net = cm.parallelize(model, cm.plan(model, (4, 1, 8, 8), Mesh(pipe=2), "pipeline"), nn.functional.mse_loss)
    with pytest.raises(ConfigError, match="`balance` needs a plan without a pipeline"):
        cm.Balancer(net)


def test_pipelines_are_refused(pools: Pools) -> None:
    pools[2].run(piped)


def refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1))
    net = cm.parallelize(model, cm.plan(model, (4, 1, 8, 8), Mesh(data=1), "data"))
    with pytest.raises(ConfigError, match=r"`every` .=2. must be at least 3"):
        cm.Balancer(net, every=2)


def test_wrong_intervals_are_refused(pools: Pools) -> None:
    pools[1].run(refused)


def test_a_run_moves_slabs_with_samples_in_memory_and_a_profile(pools: Pools, tmp_path: Path) -> None:
    """Segmentation: inputs and targets are cut in space, kept by the ranks that read them first, and cut anew."""
    tables: dict[str, Any] = {
        "batch": 8,
        "epochs": 10,
        "loss": "tests.balance.slow_ranks:slowed_loss",
        "model": {"name": "tests.train.runs:painter"},
        "data": {
            "source": "tests.train.runs:maps",
            "args": {"samples": 24},
            "test_source": "tests.train.runs:maps",
            "store_gib": 0.001,
        },
        "plan": {"strategy": "spatial", "mesh": {"height": 2}},
    }
    balanced = {**tables, "balance": {"mode": "auto", "every": 5}, "profile_steps": 4}
    summary = pools[2].run(ran_alone, balanced, str(tmp_path / "two"))[0]
    pools[1].run(ran, {**tables, "plan": {"strategy": "data"}}, str(tmp_path / "one"))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
    assert summary["balance"]["shares"]["height"][0] > summary["balance"]["shares"]["height"][1]
    assert any((tmp_path / "two" / "profile").iterdir())
