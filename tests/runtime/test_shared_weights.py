"""A weight that two layers share."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh
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
