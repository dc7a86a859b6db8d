"""Recurrent layers as stages of a pipeline, with micro-batches of samples: as on one device."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh
from tests.conftest import Pools


class Stack(nn.Module):
    """Two layers that read a sequence, the second begun with the last states of the first, and a head on each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(3, 6, batch_first=True), nn.LSTM(6, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        seen, states = self.first(x)
        return self.head(self.second(seen, states)[0]).transpose(1, 2)


def trained(schedule: str) -> float:
    """The largest difference of a step's loss and gradients from those of one process, relative to the largest."""
    torch.manual_seed(0)
    model, whole = Stack().double(), Stack().double()
    x, target = torch.randn(4, 5, 3, dtype=torch.float64), torch.randint(0, 4, (4, 5))
    plan = cm.plan(model, tuple(x.shape), Mesh(pipe=2), "pipeline", microbatches=2, schedule=schedule)  # type: ignore[arg-type]
    net = cm.parallelize(model, plan, F.cross_entropy)
    whole.load_state_dict(net.full_state_dict())
    loss, expected = net(net.shard_input(x), net.shard_target(target)), F.cross_entropy(whole(x), target)
    loss.backward()
    expected.backward()
    own = net.full_gradients()
    pairs = [(loss, expected), *((own[n], p.grad) for n, p in whole.named_parameters())]
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def test_a_stack_of_recurrent_layers_is_exact_in_stages(pools: Pools) -> None:
    for schedule in ("1f1b", "zero-bubble"):
        assert max(pools[2].run(trained, schedule)) < 1e-12
