"""A weight that two layers share."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.errors import PlanError
from tests.conftest import Pools


class Twice(nn.Module):
    """Two layers, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x)))  # type: ignore[no-any-return]


def losses(mesh: Mesh, strategy: str) -> tuple[list[float], bool]:
    torch.manual_seed(0)
    model, x = Twice().double(), torch.randn(2, 4, 6, 6, dtype=torch.float64)
    net = cm.parallelize(model, cm.plan(model, x, mesh, strategy), loss=F.mse_loss)
    optimizer = net.optimizer(torch.optim.SGD, lr=0.5)
    found = []
    for _ in range(3):
        loss = net(net.shard_input(x), net.shard_target(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, net.get_parameter("first.weight") is net.get_parameter("second.weight")


@pytest.mark.parametrize("strategy", ["filter", "channel"])
def test_shared_weight_stays_one_when_it_is_cut(pools: Pools, strategy: str) -> None:
    ((expected, _),) = pools[1].run(losses, Mesh(data=1), "data")
    for found, is_shared in pools[2].run(losses, Mesh(**{strategy: 2}), strategy):
        assert is_shared
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=1e-9)


class Tied(nn.Module):
    """An embedding whose table a head uses, as a layer or as a function."""

    def __init__(self, as_layer: bool) -> None:
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.words.weight
        self.as_layer = as_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.mix(self.words(x)))
        scores = self.head(y) if self.as_layer else F.linear(y, self.words.weight)
        return scores.transpose(1, 2)


def words() -> torch.Tensor:
    return torch.randint(0, 9, (4, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("strategy", "mesh"), [("filter", Mesh(filter=2)), ("data+channel", Mesh(data=2, channel=2))])
def test_a_table_and_the_head_that_shares_it_are_cut_by_words(strategy: str, mesh: Mesh) -> None:
    model = Tied(as_layer=True)
    plan = cm.plan(model, words(), mesh, strategy)
    shapes = {weight.name: weight.local_shape for weight in cm.lower_plan(plan).program.weights}
    assert shapes["words.weight"] == (5, 8)
    assert (plan.split("words").algorithm, plan.split("head").algorithm) == ("x", "y")
    verified = cm.verify(model, words(), plan, steps=2, loss=F.cross_entropy, target=words())
    assert verified.ok, str(verified)


def test_a_table_that_a_function_uses_is_cut_with_it() -> None:
    model = Tied(as_layer=False)
    plan = cm.plan(model, words(), Mesh(filter=2), "filter")
    assert (plan.split("words").algorithm, plan.split("linear").algorithm) == ("x", "y")
    shapes = {weight.name: weight.local_shape for weight in cm.lower_plan(plan).program.weights}
    assert shapes["words.weight"] == (5, 8)
    assert cm.verify(model, words(), plan, steps=2).ok


class Both(nn.Module):
    """A weight that is read as it is, and that another is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.weight), self.weight.square())


@pytest.mark.parametrize(("strategy", "mesh"), [("data", Mesh(data=2)), ("filter", Mesh(filter=2))])
def test_a_weight_that_another_is_computed_from_is_summed_once(strategy: str, mesh: Mesh) -> None:
    model = Both()
    verified = cm.verify(model, (4, 5, 6), cm.plan(model, (4, 5, 6), mesh, strategy), steps=1)
    assert verified.ok, str(verified)


def test_a_shared_weight_is_not_cut_in_one_layer_only() -> None:
    with pytest.raises(PlanError, match="'head' is cut by filter, but 'words' has the same weight, and is not"):
        cm.plan(Tied(as_layer=True), words(), Mesh(filter=2), {"*": {}, "head": {"channel": "filter"}})
