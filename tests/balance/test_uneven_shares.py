"""Uneven shares give what one device gives, for samples and for space, and may move while a network trains."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import convmesh as cm
from convmesh import Mesh
from convmesh.errors import MeshError, PlanError
from convmesh.testing import run_ranks
from tests.conftest import Pools

TOLERANCE = 1e-9


class Hourglass(nn.Module):
    """Down and up again with a skip connection, strides, batch norm and dropout; every pixel has a class."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.deeper = nn.Conv2d(6, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 6, 4, stride=4)
        self.last = nn.Conv2d(10, 3, 1)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.relu(self.norm(self.first(x)))
        deep = torch.relu(self.deeper(torch.relu(self.down(wide))))
        out: torch.Tensor = self.last(self.drop(torch.cat([wide, self.up(deep)], 1)))
        return out


def hourglass() -> nn.Module:
    torch.manual_seed(0)
    return Hourglass().double()


def batch(number: int, samples: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(number)
    x = torch.randn(samples, 1, 16, 12, dtype=torch.float64, generator=draws)
    return x, (x[:, 0] > 0).long() + (x[:, 0] > 1).long()


def trained(axes: dict[str, int], shares: list[dict[str, tuple[int, ...]]], options: dict[str, Any]) -> Any:
    """Losses of a step for each of `shares`, first gradients and last weights; batches have uneven sizes."""
    model = hourglass()
    plan = cm.plan(model, batch(0)[0], Mesh(**axes), "data+spatial", **options)
    net = cm.parallelize(model, plan, cross_entropy)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    local: list[tuple[int, ...]] = []
    for number, now in enumerate(shares):
        x, target = batch(number, samples=6 - number % 2)
        net.manual_seed(number)
        before = net.shard_input(x), net.shard_target(target)
        net.set_shares(**now)
        # Every third batch was cut before the shares moved, as one that is read ahead.
        parts = before if number % 3 == 2 else (net.shard_input(x), net.shard_target(target))
        local.append(tuple(parts[0].shape))
        loss = net(*parts)
        loss.backward()
        gradients = gradients or net.full_gradients()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, gradients, net.full_state_dict(), local


def check(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found[:3], expected[:3], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.fixture(scope="module")
def alone(pools: Pools) -> Any:
    return pools[1].run(trained, {}, [{}] * 3, {})[0]


def draws(ranks: int, axis: str) -> Any:
    parts = st.tuples(*[st.integers(1, 9)] * ranks)
    return st.lists(parts.map(lambda each: {axis: each}), min_size=3, max_size=3)


@pytest.mark.parametrize(("ranks", "axis"), [(2, "data"), (3, "data"), (2, "height"), (3, "width")])
@settings(max_examples=2)
@given(drawn=st.data())
def test_any_shares_train_as_one_device(pools: Pools, alone: Any, ranks: int, axis: str, drawn: st.DataObject) -> None:
    check(pools[ranks].run(trained, {axis: ranks}, drawn.draw(draws(ranks, axis)), {})[0], alone)


def test_shares_of_two_axes_at_once(pools: Pools, alone: Any) -> None:
    shares: list[dict[str, tuple[int, ...]]] = [{"data": (2, 1)}, {"height": (1, 3)}, {"data": (1, 5)}]
    found = pools[4].run(trained, {"data": 2, "height": 2}, shares, {"checkpoint": ("down", "deeper")})
    check(found[0], alone)
    assert found[0][3] == [(4, 1, 8, 12), (3, 1, 4, 12), (4, 1, 4, 12)]  # the last was cut before samples moved


def test_shares_where_dense_layers_are_cut_over_the_same_axis(pools: Pools) -> None:
    """Hybrid: dense layers are cut over the axis whose samples are uneven."""
    expected = pools[1].run(dense_net, {}, "data")[0]
    torch.testing.assert_close(pools[2].run(dense_net, {"data": (1, 3)}, "hybrid")[0], expected, rtol=1e-9, atol=1e-9)


def dense_net(shares: dict[str, tuple[int, ...]], strategy: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 8), nn.Linear(8, 3)).double()
    x = batch(0)[0][:, :, :8, :8]
    mesh = Mesh(**{axis: len(parts) for axis, parts in shares.items()})
    net = cm.parallelize(model, cm.plan(model, x, mesh, strategy), cross_entropy)
    net.set_shares(**shares)
    loss = net(net.shard_input(x), net.shard_target(torch.arange(6) % 3))
    loss.backward()
    return loss.item(), net.full_gradients()


def test_a_plan_keeps_its_shares_in_its_file(tmp_path: Any) -> None:
    mesh = Mesh(data=2, height=2).with_shares(height=(6, 2))
    plan = cm.plan(hourglass(), batch(0)[0], mesh, "data+spatial")
    plan.save(tmp_path / "plan.toml")
    read = cm.load_plan(tmp_path / "plan.toml")
    assert read.mesh == mesh
    assert read.mesh.shares == {"height": (3, 1)}
    assert read.mesh != Mesh(data=2, height=2)
    assert read.mesh.with_shares(height=(1, 1)) == Mesh(data=2, height=2)


def test_the_program_of_a_plan_follows_its_shares() -> None:
    """The larger slab computes more, and a prediction counts it."""
    mesh = Mesh(height=2).with_shares(height=(3, 1))
    even, uneven = (cm.plan(hourglass(), (6, 1, 64, 12), at, "spatial") for at in (mesh.even, mesh))
    large, small = (cm.lower_plan(uneven, rank).program for rank in (0, 1))
    half = cm.lower_plan(even, 0).program
    outputs = [program.nodes[1].outputs[0].box(rank).size for program, rank in ((large, 0), (half, 0), (small, 1))]
    assert outputs[0] * 2 == outputs[1] * 3 == outputs[2] * 6


def test_wrong_shares_are_refused_by_name() -> None:
    with pytest.raises(MeshError, match=r"`filter` \(=\(1, 2\)\): only axes that cut samples or space"):
        Mesh(filter=2).with_shares(filter=(1, 2))
    with pytest.raises(MeshError, match=r"`data` \(=\(1, 2, 3\)\) must be one positive whole number for each of the 2"):
        Mesh(data=2).with_shares(data=(1, 2, 3))
    with pytest.raises(MeshError, match=r"`data` \(=\(1, 0\)\)"):
        Mesh(data=2).with_shares(data=(1, 0))
    with pytest.raises(PlanError, match="micro-batches have equal shares"):
        cm.plan(hourglass(), batch(0)[0], Mesh(data=2, pipe=2).with_shares(data=(1, 2)), "data+pipeline")


def moved_differently() -> None:
    model = hourglass()
    net = cm.parallelize(model, cm.plan(model, batch(0)[0], Mesh(data=2), "data"), cross_entropy)
    net.set_shares(data=(1, 2 + net.mesh.rank))


def test_ranks_that_disagree_are_told(pools: Pools) -> None:
    with pytest.raises(Exception, match="set_shares"):
        run_ranks(2, moved_differently)


def compiled() -> list[float]:
    """Losses of a replayed step, before and after its samples moved."""
    model = hourglass()
    net = cm.parallelize(model, cm.plan(model, batch(0)[0], Mesh(data=2), "data"), cross_entropy, compile="eager")
    found = []
    for shares in ((1, 1), (2, 1), (1, 1)):
        net.set_shares(data=shares)
        x, target = batch(0)
        net.manual_seed(0)
        loss = net(net.shard_input(x), net.shard_target(target))
        loss.backward()
        found.append(loss.item())
    return found


def test_a_compiled_step_follows(pools: Pools) -> None:
    first, second, third = pools[2].run(compiled)[0]
    assert second == pytest.approx(first, rel=TOLERANCE)
    assert third == pytest.approx(first, rel=TOLERANCE)


def sent(axes: dict[str, int], shares: dict[str, tuple[int, ...]]) -> tuple[int, int]:
    """Bytes of a step as its program has them, and as they were counted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 5, stride=2, padding=2)).double()
    x = batch(0)[0]
    net = cm.parallelize(model, cm.plan(model, x, Mesh(**axes), "data+spatial"))
    net.set_shares(**shares)
    shard = net.shard_input(x)
    net(shard)  # the first call checks that ranks agree
    with net.mesh.traffic.watch() as traffic:
        net(shard).sum().backward()
    return net.program.bytes_sent.total(), traffic.bytes_total


@pytest.mark.parametrize("shares", [{"data": (1, 2)}, {"height": (3, 1)}, {"height": (1, 6)}])
def test_predicted_traffic_is_that_of_the_shares(pools: Pools, shares: dict[str, tuple[int, ...]]) -> None:
    for predicted, counted in pools[2].run(sent, dict.fromkeys(shares, 2), shares):
        assert predicted == counted > 0


def test_verify_keeps_the_shares(pools: Pools) -> None:
    plan = cm.plan(hourglass(), batch(0)[0], Mesh(height=2).with_shares(height=(3, 1)), "spatial")
    assert cm.verify(hourglass(), batch(0)[0], plan).ok
