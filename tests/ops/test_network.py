"""Whole networks, unchanged modules, split: losses, weights and buffers of a single process, step by step.

A dry mesh sends what a real one sends, byte for byte, without processes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from convmesh import Mesh, OpenMesh, shard
from convmesh.dist import Traffic, dry_mesh
from convmesh.ops import dice_loss
from convmesh.testing import RankPool, natural_cut, opened
from tests.draws import IS_FULL

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


class Trained(NamedTuple):
    """Losses of all steps, the weights and buffers after the last, and what this rank sends in the first."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    sent: Traffic


def loss_of(name: str, net: nn.Module, x: Any, target: Any) -> torch.Tensor:
    logits = net(x)
    loss: torch.Tensor = F.cross_entropy(logits, target)
    return loss if name == "classifier" else loss + dice_loss(logits, target)


def batch(name: str, mesh: OpenMesh | None) -> tuple[Any, Any]:
    """Samples and labels, whole or cut; on a dry mesh without values."""
    shape, is_dense = NETWORKS[name][1], name == "classifier"
    x = torch.randn(shape, dtype=torch.float64)
    target = torch.randint(0, 3, (shape[0],) if is_dense else (shape[0], *shape[2:]))
    if mesh is None:
        return x, target
    cut = natural_cut(mesh.mesh, len(shape))
    target_cut = {d - (d > 1): axis for d, axis in cut.items() if not is_dense or d == 0}
    return shard(x.to(mesh.device), mesh, cut), shard(target.to(mesh.device), mesh, target_cut)


def trained(name: str, mesh: Mesh | None) -> Trained:
    """Two steps: the second starts from weights and momentum that the first has changed."""
    torch.manual_seed(0)
    net = NETWORKS[name][0]().double()
    x, target = batch(name, opened(mesh) if mesh else None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses, sent = [], []
    for _ in range(2):
        optimizer.zero_grad()
        with opened(mesh or Mesh()).traffic.watch() as seen:
            loss = loss_of(name, net, x, target)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        sent.append(seen)
    return Trained(losses, {key: value.detach() for key, value in net.state_dict().items()}, sent[0])


def dry_traffic(name: str, mesh: Mesh, ranks: list[int]) -> list[Traffic]:
    """What ranks of a dry mesh send in a step."""
    found = []
    for rank in ranks:
        dry = dry_mesh(mesh, rank)
        net = NETWORKS[name][0]().double().to(dry.device)
        x, target = batch(name, dry)
        with dry.traffic.watch() as sent:
            loss_of(name, net, x, target).backward()
        found.append(sent)
    return found


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


def is_sampled(name: str, mesh: Mesh) -> bool:
    """Each run takes every network on every mesh of two ranks, and a third of them in turn on each larger one."""
    return mesh.size <= 2 or ([*NETWORKS].index(name) + (MESHES + DEEP_MESHES).index(mesh)) % 3 == 0


SAMPLED = [
    pytest.param(name, mesh, id=f"{name}-{mesh}", marks=[pytest.mark.full] * (not is_sampled(name, mesh)))
    for name, mesh in RUNS
]


Runs = Callable[..., list[Trained]]


@pytest.fixture(scope="module")
def runs(pools: dict[int, RankPool]) -> Runs:
    """Trainings, each run once for all that is asked of it."""

    @functools.cache
    def run(name: str, mesh: Mesh | None) -> list[Trained]:
        return pools[mesh.size if mesh else 1].run(trained, name, mesh)

    return run


@pytest.mark.parametrize(("name", "mesh"), SAMPLED)
def test_training_is_that_of_one_process(name: str, mesh: Mesh, runs: Runs) -> None:
    (whole,) = runs(name, None)
    for losses, weights, _ in runs(name, mesh):
        assert losses == pytest.approx(whole.losses, rel=1e-10)
        for key, value in whole.state.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-10, msg=key)


@pytest.mark.parametrize(("name", "mesh"), SAMPLED)
def test_dry_traffic_equals_real_traffic(name: str, mesh: Mesh, runs: Runs, pools: dict[int, RankPool]) -> None:
    real = [rank.sent for rank in runs(name, mesh)]
    ranks = [*range(mesh.size)] if IS_FULL or mesh.size <= 4 else [0, mesh.size // 2 - 1, mesh.size - 1]
    assert pools[1].run(dry_traffic, name, mesh, ranks)[0] == [real[rank] for rank in ranks]
    assert min(sent.bytes_total for sent in real) > 0


def test_every_network_and_every_mesh_is_in_the_sample() -> None:
    large = [(name, mesh) for name, mesh in RUNS if mesh.size > 2 and is_sampled(name, mesh)]
    assert {name for name, _ in large} == {*NETWORKS}
    assert {mesh for _, mesh in large} == {mesh for _, mesh in RUNS if mesh.size > 2}


def test_a_step_of_many_ranks_needs_no_processes(pools: dict[int, RankPool]) -> None:
    pools[1].run(step_of_many_ranks)


def step_of_many_ranks() -> None:
    mesh = dry_mesh(Mesh(data=64, depth=4, height=4, width=4), rank=2048)
    x = shard(torch.empty(64, 1, 512, 512, 512, device="meta"), mesh, natural_cut(mesh.mesh, 5))
    weight = torch.empty(8, 1, 3, 3, 3, device="meta", requires_grad=True)
    with mesh.traffic.watch() as sent:
        y = F.conv3d(x, weight, padding=1)  # type: ignore[call-overload]
        y.backward(torch.empty_like(y.local))
    assert y.shape == (64, 8, 512, 512, 512)
    assert sent.calls["neighbour"] == 7  # a rank at the corner of the volume sends 3 faces, 3 edges and a corner
    assert sent.bytes_sent["neighbour"] == 4 * (3 * 128**2 + 3 * 128 + 1)
