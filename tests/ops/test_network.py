"""Whole networks, unchanged modules, split: losses, weights and buffers of a single process, step by step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from convmesh import Mesh, shard
from convmesh.ops import dice_loss
from convmesh.testing import RankPool, natural_cut, opened

Make = Callable[[], nn.Module]
CONV: dict[int, Any] = {2: nn.Conv2d, 3: nn.Conv3d}


class Block(nn.Module):
    """Convolution, a norm, an activation; residual if shapes allow."""

    def __init__(self, channels: int, filters: int, norm: str, dims: int, **options: Any) -> None:
        super().__init__()
        self.conv = CONV[dims](channels, filters, 3, **{"padding": 1, **options})
        self.norm = self._norm(norm, filters, dims)

    @staticmethod
    def _norm(norm: str, filters: int, dims: int) -> nn.Module:
        batch, instance = {2: (nn.BatchNorm2d, nn.InstanceNorm2d), 3: (nn.BatchNorm3d, nn.InstanceNorm3d)}[dims]
        norms: dict[str, Callable[[], nn.Module]] = {
            "batch": lambda: batch(filters),
            "group": lambda: nn.GroupNorm(2, filters),
            "instance": lambda: instance(filters, affine=True),
        }
        return norms[norm]()

    def forward(self, x: Any) -> Any:
        y = F.leaky_relu(self.norm(self.conv(x)), 0.1)
        return x + y if x.shape == y.shape else y


class UNet(nn.Module):
    """Three levels; levels go down by pooling or stride and up by transposed convolution or interpolation."""

    def __init__(self, norm: str, down: str, up: str, dims: int = 3) -> None:
        super().__init__()
        self.down, self.up = down, up
        options = {"stride": 2} if down == "stride" else {}
        self.enter = Block(1, 4, norm, dims)
        self.sink = nn.ModuleList([Block(4, 4, norm, dims, **options), Block(4, 4, norm, dims, **options)])
        transposed: Any = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims]
        self.rise = nn.ModuleList([transposed(4, 4, 3, stride=2, padding=1, output_padding=1) for _ in range(2)])
        self.merge = nn.ModuleList([Block(8, 4, norm, dims), Block(8, 4, norm, dims)])
        self.leave = CONV[dims](4, 3, 1)

    def forward(self, x: Any) -> Any:
        levels = [self.enter(x)]
        for block in self.sink:
            levels.append(block(self._pooled(levels[-1])))
        y = levels[-1]
        for skip, rise, merge in zip(reversed(levels[:-1]), self.rise, self.merge, strict=True):
            y = merge(torch.cat([skip, self._raised(y, skip, rise)], 1))
        return self.leave(y)

    def _pooled(self, x: Any) -> Any:
        pool: Any = F.max_pool3d if x.dim() == 5 else F.max_pool2d
        return pool(x, 3, 2, 1) if self.down == "pool" else x

    def _raised(self, y: Any, skip: Any, rise: nn.Module) -> Any:
        mode = {"linear": "trilinear" if y.dim() == 5 else "bilinear", "nearest": "nearest"}.get(self.up)
        if mode is None:
            raised = rise(y)
            return raised[(slice(None), slice(None), *(slice(0, n) for n in skip.shape[2:]))]
        corners = None if mode == "nearest" else False
        return F.interpolate(y, size=tuple(skip.shape[2:]), mode=mode, align_corners=corners)


class Classifier(nn.Module):
    """Strided, grouped, dilated and periodic convolutions, global pooling, flatten and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8),
            nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"),
            nn.SiLU(),
            nn.AvgPool2d(2, ceil_mode=True),
        )
        self.dense = nn.Linear(8 * 4, 6)
        self.head = nn.Linear(6 + 8, 3)

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        pooled = F.adaptive_avg_pool2d(y, 2).flatten(1)
        return self.head(torch.cat([torch.tanh(self.dense(pooled)), y.mean((2, 3))], 1))


NETWORKS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "unet3d-batch": (lambda: UNet("batch", "pool", "transposed"), (2, 1, 12, 10, 9)),
    "unet3d-instance": (lambda: UNet("instance", "stride", "linear"), (1, 1, 13, 8, 11)),
    "unet3d-group-odd": (lambda: UNet("group", "pool", "nearest"), (1, 1, 10, 20, 7)),
    "unet2d-batch": (lambda: UNet("batch", "stride", "transposed", dims=2), (3, 1, 18, 21)),
    "classifier": (Classifier, (4, 1, 33, 30)),
}


def losses_and_state(name: str, mesh: Mesh | None, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    net = make().double()
    x = torch.randn(shape, dtype=torch.float64)
    dense = name == "classifier"
    target = torch.randint(0, 3, (shape[0],) if dense else (shape[0], *shape[2:]))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    if mesh is not None:
        cut = natural_cut(mesh, len(shape))
        x = shard(x, opened(mesh), cut)  # type: ignore[assignment]
        target_cut = {d - (d > 1): axis for d, axis in cut.items() if not dense or d == 0}
        target = shard(target, opened(mesh), target_cut)  # type: ignore[assignment]
    losses = []
    for _ in range(steps):
        logits = net(x)
        loss = F.cross_entropy(logits, target) + (0 if dense else dice_loss(logits, target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {key: value.detach() for key, value in net.state_dict().items()}


MESHES = [
    Mesh(height=2),
    Mesh(data=2),
    Mesh(height=3),
    Mesh(height=2, width=2),
    Mesh(data=2, height=3),
    Mesh(data=2, height=2, width=2),
    Mesh(height=8),
]
DEEP_MESHES = [Mesh(depth=2), Mesh(depth=2, height=2, width=2), Mesh(data=2, depth=2, width=2), Mesh(depth=6)]


RUNS = [(name, mesh) for name, (_, shape) in NETWORKS.items() for mesh in MESHES + DEEP_MESHES * (len(shape) > 4)]


@pytest.mark.parametrize(("name", "mesh"), RUNS, ids=str)
def test_training_is_that_of_one_process(name: str, mesh: Mesh, pools: dict[int, RankPool]) -> None:
    expected, state = pools[1].run(losses_and_state, name, None)[0]
    for losses, weights in pools[mesh.size].run(losses_and_state, name, mesh):
        assert losses == pytest.approx(expected, rel=1e-10)
        for key, value in state.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-10, msg=key)
