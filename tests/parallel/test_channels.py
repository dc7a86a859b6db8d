"""Models with cut channels: choices, pairs, traffic, training and refusals."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from convmesh import Mesh, UnsupportedError, shard
from convmesh.parallel import cut_channels, plan_channels
from convmesh.testing import RankPool, natural_cut, opened

Pools = dict[int, RankPool]


class Bottleneck(nn.Module):
    """A narrow-wide-narrow block with batch norm, activation and residual."""

    def __init__(self, norm: str = "batch") -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.widen = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16) if norm == "batch" else nn.GroupNorm(4, 16)
        self.narrow = nn.Conv2d(16, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.down = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(12, 8, 2, stride=2)
        self.head = nn.Linear(8, 6)

    def forward(self, x: Any) -> Any:
        y = F.relu(self.enter(x))
        y = y + self.narrow(F.relu(self.norm(self.widen(y))))
        y = F.silu(self.depthwise(y))
        y = self.up(F.relu(self.down(y)))
        return self.head(y.mean((2, 3)))


SAMPLE = (4, 3, 8, 6)
MESHES = [
    Mesh(channel=2),
    Mesh(filter=4),
    Mesh(channel=2, filter=2),
    Mesh(data=2, channel=2),
    Mesh(height=2, channel=2),
    Mesh(data=2, height=2, filter=2),
    Mesh(height=2, channel=2, filter=2),
]


def trained(mesh: Mesh | None, algorithm: Any = "auto", norm: str = "batch", keeps: bool = True) -> Any:
    """Losses of three steps and the whole weights after them."""
    torch.manual_seed(0)
    net = Bottleneck(norm).double()
    x, target = torch.randn(SAMPLE, dtype=torch.float64), torch.randint(0, 6, SAMPLE[:1])
    if mesh is not None:
        opened(mesh).keeps_gathered = keeps
        cut = natural_cut(mesh, 4)
        cut_channels(net, SAMPLE, opened(mesh), cut, algorithm)
        x = shard(x, opened(mesh), cut)  # type: ignore[assignment]
        target = shard(target, opened(mesh), {d: a for d, a in cut.items() if d == 0})  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(net(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = net.state_dict()
    return losses, {k: v.full_tensor() if isinstance(v, DTensor) else v.detach() for k, v in state.items()}


def assert_trains_alike(mesh: Mesh, pools: Pools, **options: Any) -> None:
    expected, state = trained(None, norm=options.get("norm", "batch"))
    for losses, weights in pools[mesh.size].run(trained, mesh, *options.values()):
        assert losses == pytest.approx(expected, rel=1e-10)
        for key, value in state.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-8, atol=1e-9, msg=key)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("algorithm", ["auto", "x", "y"])
def test_training_is_that_of_one_process(mesh: Mesh, algorithm: str, pools: Pools) -> None:
    chosen: Any = algorithm if algorithm == "auto" else {"enter": "auto", "*": algorithm}
    assert_trains_alike(mesh, pools, algorithm=chosen)
