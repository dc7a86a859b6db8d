"""Dense layers cut by filters over the axis that cuts the samples, one sub-batch at a time."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh
from tests.conftest import Pools


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc1, self.fc2, self.fc3 = (
            nn.Conv2d(2, 4, 3),
            nn.Linear(64, 10),
            nn.Linear(10, 9),
            nn.Linear(9, 7),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.fc1(F.relu(self.conv(x)).flatten(1)))
        result: torch.Tensor = self.fc3(F.relu(self.fc2(x)))
        return result


def gradients(mesh: Mesh | None, samples: int, algorithm: str, parts: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Head().double()
    x = torch.randn(samples, 2, 6, 6, dtype=torch.float64)
    target = torch.arange(samples) % 7
    if mesh is None:
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in model.named_parameters()}
    dense = {"channel": "data", "algorithm": algorithm}
    plan = cm.plan(model, x, mesh, {"conv": {"sample": "data"}, "fc*": dense}, sub_batches=parts)
    net = cm.parallelize(model, plan, loss=F.cross_entropy)
    loss = net(net.shard_input(x), net.shard_target(target))
    loss.backward()
    return loss.detach(), net.full_gradients(), net.program.messages


@pytest.mark.parametrize(("ranks", "samples"), [(2, 8), (3, 7), (4, 3)])
@pytest.mark.parametrize("algorithm", ["x", "y", "auto"])
def test_losses_and_gradients_are_those_of_one_process(pools: Pools, ranks: int, samples: int, algorithm: str) -> None:
    (whole,) = pools[1].run(gradients, None, samples, "", 1)
    for parts in (1, 3):
        for loss, grads, _ in pools[ranks].run(gradients, Mesh(data=ranks), samples, algorithm, parts):
            torch.testing.assert_close((loss, grads), whole, rtol=1e-10, atol=1e-12)


def test_sub_batches_travel_one_by_one(pools: Pools) -> None:
    """The same bytes in more messages: each sub-batch travels separately."""
    (once,), (thrice,) = ([r[2] for r in pools[2].run(gradients, Mesh(data=2), 12, "y", n)][:1] for n in (1, 3))
    assert sum(thrice.values()) > sum(once.values())
