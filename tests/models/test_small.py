"""Small versions train, can be traced, and run on shards without a missing operator."""

import pytest
import torch
from torch import fx

from convmesh import Mesh, shard
from convmesh.dist import dry_mesh
from convmesh.models import Small, find, names
from convmesh.testing import RankPool

WITH_DROPOUT = ["alexnet", "vgg16", "inception3", "mobilenet-v2", "cosmoflow", "cosmoflow-512"]


NOISE = 1e-13


DEEPER = ("resnet152",)
"""Networks that are another one with more of the same layers: only `make test-full` has them take steps."""

SLOW = ("vnet", "unet3d", "mobilenet-v2", "meshnet-2k", "cosmoflow-bn", "cosmoflow-512")
"""Networks whose steps take longest: what they make of rounding changes with their definition alone."""

NETWORKS = [pytest.param(name, marks=[pytest.mark.full] * (name in DEEPER)) for name in names()]


def trained(small: Small, noise: float, steps: int = 3) -> tuple[list[float], torch.Tensor]:
    """Losses and weights after a few steps on the same batch, whose values are off by `noise`."""
    torch.manual_seed(0)
    net = small.create().double()
    x, target = small.draw_input(), small.draw_target()
    x *= 1 + noise * torch.randn_like(x)
    optimizer = torch.optim.SGD(net.parameters(), lr=small.rate, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = small.task.loss()(net(x), target)
        optimizer.zero_grad()
        loss.backward()
        idle = [name for name, value in net.named_parameters() if value.grad is None or not value.grad.isfinite().all()]
        assert not idle, f"no finite gradient: {idle}"
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([value.detach().flatten() for value in net.parameters()])


def growth(small: Small) -> tuple[list[float], float]:
    """Losses, and the factor by which an input error has grown in the weights."""
    losses, exact = trained(small, 0.0)
    _, weights = trained(small, NOISE)
    return losses, ((weights - exact).abs().max() / NOISE).item()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in DEEPER + SLOW)) for name in names()]
)
def test_a_small_network_trains_without_amplifying_rounding_errors(name: str, pools: dict[int, RankPool]) -> None:
    (first, *_, last), grown = pools[1].run(growth, find(name).small())[0]
    assert last < first
    assert grown < 1e3  # so that rounding errors of 1e-15 stay well below the 1e-9 to which plans are compared


@pytest.mark.parametrize("name", names())
def test_a_small_network_is_traced_as_it_runs(name: str, pools: dict[int, RankPool]) -> None:
    pools[1].run(check_trace, find(name).small())


def check_trace(small: Small) -> None:
    torch.manual_seed(0)
    net = small.create().eval().double()
    x = small.draw_input()
    with torch.no_grad():
        torch.testing.assert_close(fx.symbolic_trace(net)(x), net(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", names())
def test_a_small_network_has_all_stages(name: str) -> None:
    reference = find(name)
    small = reference.small()
    with torch.device("meta"):
        published = [layer for layer, _ in reference.create().named_children()]
        assert [layer for layer, _ in small.create().named_children()] == published
    assert small.shape[0] >= 4
    assert max(small.shape[1:]) >= 31


def dry_step(small: Small, sizes: dict[str, float]) -> list[str]:
    """One rank's training step on meta tensors with samples and height cut; returns what got no gradient."""
    mesh = dry_mesh(Mesh(data=2, height=2), rank=1)
    with mesh.device:
        net = small.create(**sizes).double()
    height = max(1, len(small.shape) - 2)
    x = shard(small.draw_input().to("meta"), mesh, {0: "data", height: "height"})
    rows = {"class per voxel": height - 1, "class per word": height, "frames": height}
    place = {rows[small.task.kind]: "height"} if small.task.kind in rows else {}
    target = shard(small.draw_target().to("meta"), mesh, {0: "data"} | place)
    loss = small.task.loss()(net(x), target)
    assert loss.shape == ()
    loss.backward()
    assert mesh.traffic.bytes_total > 0
    return [name for name, value in net.named_parameters() if value.grad is None]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_small_network_runs_on_shards(name: str, pools: dict[int, RankPool]) -> None:
    assert pools[1].run(dry_step, find(name).small(), {}) == [[]]


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_as_published_runs_on_shards(name: str, pools: dict[int, RankPool]) -> None:
    assert pools[1].run(dry_step, find(name).small(), {"dropout": 0.5}) == [[]]


def test_targets_fit_the_task() -> None:
    generator = torch.Generator().manual_seed(0)
    classes = find("resnet18").small().draw_target(generator)
    assert (classes.shape, classes.dtype) == ((4,), torch.int64)
    voxels = find("meshnet").small().draw_target(generator)
    assert (voxels.shape, int(voxels.max())) == ((4, 4, 2), 1)
    values = find("cosmoflow").small().draw_target(generator)
    assert (values.shape, values.dtype) == ((4, 4), torch.float64)
    assert values.abs().max() <= 1
