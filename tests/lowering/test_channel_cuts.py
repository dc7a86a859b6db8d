"""Models with cut channels: choices, pairs, traffic, training and refusals."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from convmesh import Mesh, Split, UnsupportedError, plan, shard
from convmesh.dist import dry_mesh
from convmesh.dist.cut_weights import cuts_of
from convmesh.graph import Node
from convmesh.lowering.channel_cuts import cut_channels, plan_channels
from convmesh.lowering.opaque import run_opaque
from convmesh.ops.channels.channel_layers import GATHERS_AGAIN
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
    Mesh(),
    Mesh(data=2),
    Mesh(channel=2),
    Mesh(filter=4),
    Mesh(channel=2, filter=2),
    Mesh(data=2, channel=2),
    Mesh(height=2, channel=2),
    Mesh(data=2, height=2, filter=2),
    Mesh(height=2, channel=2, filter=2),
]


def trained(mesh: Mesh | None, algorithm: Any = "auto", norm: str = "batch", most: int | None = None) -> Any:
    """Losses of two steps and the whole weights after them."""
    torch.manual_seed(0)
    net = Bottleneck(norm).double()
    x, target = torch.randn(SAMPLE, dtype=torch.float64), torch.randint(0, 6, SAMPLE[:1])
    if mesh is not None:
        cut = natural_cut(mesh, 4)
        cut_channels(net, SAMPLE, opened(mesh), cut, algorithm, most)
        x = shard(x, opened(mesh), cut)  # type: ignore[assignment]
        target = shard(target, opened(mesh), {d: a for d, a in cut.items() if d == 0})  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        loss = F.cross_entropy(net(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = net.state_dict()
    return losses, {k: v.full_tensor() if isinstance(v, DTensor) else v.detach() for k, v in state.items()}


@pytest.fixture(scope="module")
def whole(pools: Pools) -> Callable[[str], Any]:
    """What one process trains, by the kind of norm."""
    return functools.cache(lambda norm: pools[1].run(trained, None, "auto", norm)[0])


def assert_trains_alike(mesh: Mesh, pools: Pools, whole: Callable[[str], Any], **options: Any) -> None:
    expected, state = whole(options.get("norm", "batch"))
    for losses, weights in pools[mesh.size].run(trained, mesh, *options.values()):
        assert losses == pytest.approx(expected, rel=1e-10)
        for key, value in state.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-8, atol=1e-9, msg=key)


def choices() -> list[Any]:
    """Each algorithm on each mesh; of those with three axes, a run takes y on one, and on the other what is best."""
    taken = [("y", Mesh(data=2, height=2, filter=2)), ("auto", Mesh(height=2, channel=2, filter=2))]
    return [
        pytest.param(
            name, mesh, id=f"{name}-{mesh}", marks=[pytest.mark.full] * (mesh.size > 4 and (name, mesh) not in taken)
        )
        for name in ("auto", "x", "y")
        for mesh in MESHES
    ]


@pytest.mark.parametrize(("algorithm", "mesh"), choices())
def test_training_is_that_of_one_process(algorithm: str, mesh: Mesh, pools: Pools, whole: Callable[[str], Any]) -> None:
    chosen: Any = algorithm if algorithm == "auto" else {"enter": "auto", "*": algorithm}
    assert_trains_alike(mesh, pools, whole, algorithm=chosen)


@pytest.mark.parametrize("mesh", [Mesh(channel=2), Mesh(channel=3), Mesh(height=2, channel=2, filter=2)], ids=str)
def test_group_norm_and_gathering_again_train_alike(mesh: Mesh, pools: Pools, whole: Callable[[str], Any]) -> None:
    algorithm = {"down": "whole", "head": "whole", "depthwise": "whole", "*": "auto"}
    assert_trains_alike(mesh, pools, whole, algorithm=algorithm, norm="group", most=0)


def phase_bytes(
    mesh: Mesh, algorithm: Any, shape: tuple[int, ...], filters: int, learns: bool
) -> tuple[int, int, int, int]:
    """Bytes sent by one convolution forward and backward, and those of the plan."""
    net = nn.Conv2d(shape[1], filters, 3, padding=1, bias=False)
    cut: Any = natural_cut(mesh, 4) | {1: tuple(axis for axis in ("channel", "filter") if axis in mesh.axes)}
    sample = torch.randn(shape, requires_grad=learns)
    plan = cut_channels(net, sample, opened(mesh), cut, algorithm)
    (moved,) = (layer.moved for layer in plan.layers.values())
    x = shard(torch.randn(shape), opened(mesh), cut)
    x = x.like(x.local.requires_grad_(learns))
    with opened(mesh).traffic.watch() as forward:
        y = net(x)
    with opened(mesh).traffic.watch() as backward:
        y.backward(torch.randn(y.local.shape))
    said_forward = moved.gather_input + moved.scatter_output
    return forward.bytes_total, backward.bytes_total, 4 * said_forward, 4 * (moved.total - said_forward)


# The volumes of Dryden et al. (SC 2019): shares of |x| and |y|, local but with all channels, that a rank sends a pass.
@pytest.mark.parametrize(
    ("mesh", "algorithm", "share_x", "share_y"),
    [
        (Mesh(channel=2), "x", 0, 1 / 2),
        (Mesh(channel=2), "y", 1 / 2, 0),
        (Mesh(filter=4), "x", 0, 3 / 4),
        (Mesh(filter=4), "y", 3 / 4, 0),
        (Mesh(channel=2, filter=2), "x", 0, 3 / 4),
        (Mesh(channel=2, filter=2), "y", 3 / 4, 0),
        (Mesh(channel=2, filter=2), "w", 1 / 2 / 2, 1 / 2 / 2),
        (Mesh(channel=2, filter=4), "w", 3 / 4 / 2, 1 / 2 / 4),
        (Mesh(channel=4, filter=2), "w", 1 / 2 / 4, 3 / 4 / 2),
    ],
    ids=str,
)
def test_traffic_is_the_plan_and_the_closed_form(
    mesh: Mesh, algorithm: str, share_x: float, share_y: float, pools: Pools
) -> None:
    samples, channels, filters, space = 2, 8, 16, 30
    size_x, size_y = samples * channels * space, samples * filters * space
    expected = 4 * (share_x * size_x + share_y * size_y)
    for rank in pools[mesh.size].run(phase_bytes, mesh, algorithm, (samples, channels, 6, 5), filters, True):
        assert rank == (expected,) * 4
    for rank in pools[mesh.size].run(phase_bytes, mesh, algorithm, (samples, channels, 6, 5), filters, False):
        assert rank == (expected, expected - 4 * share_x * size_x) * 2


def test_stationary_w_sends_two_thirds_of_stationary_x_on_four_ranks() -> None:
    net, mesh = nn.Conv2d(16, 16, 3, padding=1), Mesh(channel=2, filter=2)
    sample = torch.empty(2, 16, 8, 8, requires_grad=True)
    cut = {1: ("channel", "filter")}
    moved = {
        algorithm: plan_channels(net, sample, mesh, cut, algorithm).layers[""].moved.total
        for algorithm in ("x", "y", "w", "auto")
    }
    assert moved["w"] / moved["x"] <= 0.67
    assert moved["auto"] == moved["w"] < moved["y"]


def test_a_wide_middle_makes_the_pair_y_then_x() -> None:
    plan = plan_channels(Bottleneck(), SAMPLE, Mesh(channel=2))
    chosen = {name: layer.split.algorithm for name, layer in plan.layers.items()}
    expected = {"enter": "y", "widen": "y", "narrow": "x", "depthwise": "y", "down": "x", "up": "y", "head": "x"}
    assert chosen == expected
    widen, narrow = plan.layers["widen"].moved, plan.layers["narrow"].moved
    assert widen.scatter_output == narrow.gather_input == 0
    assert min(widen.gather_input, narrow.scatter_output) > 0
    assert plan.layers["enter"].moved.gather_input == 0  # 3 channels that every rank has: nothing to gather
    assert plan.layers["depthwise"].moved.total == 0


def test_no_rank_holds_a_whole_weight(pools: Pools) -> None:
    for held, whole in pools[4].run(held_and_whole, Mesh(channel=4)):
        assert held == pytest.approx(whole / 4, rel=0.02)


def held_and_whole(mesh: Mesh) -> tuple[int, int]:
    net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))
    whole = sum(p.numel() for p in net.parameters())
    cut_channels(net, (1, 8, 9, 9), opened(mesh), {1: "channel"})
    assert all(isinstance(p, DTensor) for p in net.parameters())
    return sum(p.to_local().untyped_storage().nbytes() // 4 for p in net.parameters()), whole  # type: ignore[attr-defined]


def axes_of_a_weight(mesh: Mesh) -> tuple[Any, Any]:
    """As torch knows them, and as its layer does."""
    net = nn.Conv2d(8, 16, 3)
    cut_channels(net, (2, 8, 9, 9), opened(mesh), natural_cut(mesh, 4))
    assert isinstance(net.weight, DTensor)
    return net.weight.device_mesh.mesh_dim_names, cuts_of(net.weight)


def test_axes_that_do_not_cut_a_weight_are_one_for_torch(pools: Pools) -> None:
    """Its time to find out how an operator takes a DTensor grows with the power of their number."""
    mesh = Mesh(data=2, height=2, filter=2)
    assert pools[8].run(axes_of_a_weight, mesh) == [(("data+height", "filter"), {0: ("filter",)})] * 8


@pytest.mark.parametrize(
    ("net", "mesh", "algorithm", "message"),
    [
        (
            nn.Conv2d(8, 6, 3),
            Mesh(channel=8),
            "auto",
            "layer '': 8 ranks > 6 filters; the largest split that works is 6 ways. Make the channel axes smaller, or "
            "leave it uncut: algorithm={'': 'whole'}.",
        ),
        (
            nn.Conv2d(8, 16, 3, groups=4),
            Mesh(filter=8),
            "auto",
            "layer '': 4 groups do not divide over 8 ranks; the largest split that works is 4 ways.",
        ),
        (
            nn.Sequential(nn.Conv2d(8, 16, 3)),
            Mesh(channel=4),
            "w",
            "layer '0': algorithm 'w' needs its channels cut by two axes, but they are cut by ('channel',); use a mesh "
            "with channel= and filter=, or algorithm 'x', 'y' or 'auto'.",
        ),
    ],
)
def test_uncuttable_layers_are_refused_when_planning(net: nn.Module, mesh: Mesh, algorithm: Any, message: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        plan_channels(net, (1, 8, 6, 6), mesh, {1: tuple(mesh.axes)}, algorithm)
    assert str(caught.value) == message


def kept_for_backward(mesh: Mesh, most: int | None) -> tuple[int, int]:
    """Elements that a forward pass keeps, and bytes that a backward pass sends."""
    net = nn.Conv2d(16, 16, 3, padding=1, bias=False)
    cut_channels(net, (2, 16, 8, 8), opened(mesh), {1: "channel"}, "y", most)
    x = shard(torch.randn(2, 16, 8, 8), opened(mesh), {1: "channel"})
    x = x.like(x.local.requires_grad_())
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = net(x)
    with opened(mesh).traffic.watch() as sent:
        y.backward(torch.randn(y.local.shape))
    return sum(kept.values()), sent.bytes_total


def test_gathering_again_trades_traffic_for_memory(pools: Pools) -> None:
    whole, weight = 2 * 16 * 64, 16 * 16 * 9 // 4
    for kept, sent in pools[4].run(kept_for_backward, Mesh(channel=4), None):
        assert kept == whole + weight
        assert sent == 4 * whole * 3 // 4
    for kept, sent in pools[4].run(kept_for_backward, Mesh(channel=4), 0):
        assert kept == whole // 4 + weight
        assert sent == 2 * 4 * whole * 3 // 4


def test_the_layers_that_save_most_gather_again_first() -> None:
    plan = plan_channels(Bottleneck(), SAMPLE, Mesh(channel=2))
    extras = {name: cut.gathered_extra for name, cut in plan.layers.items()}
    limited = plan_channels(Bottleneck(), SAMPLE, Mesh(channel=2), most_gathered=max(extras.values()))
    assert any(cut.gathers_again for cut in limited.layers.values())
    assert sum(extras[n] for n, cut in limited.layers.items() if not cut.gathers_again) <= max(extras.values())
    assert "again" in str(limited)


def materialised(mesh: Mesh) -> tuple[int, list[bool]]:
    """A model built on the meta device: what its parameters hold, and whether they are shards that train."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1))
    cut_channels(net, (1, 8, 6, 6), opened(mesh), {1: "channel"}, most_gathered=0)
    net.to_empty(device="cpu")
    for param in net.parameters():
        nn.init.constant_(param, 0.01)
    x = shard(torch.randn(1, 8, 6, 6), opened(mesh), {1: "channel"})
    net(x).sum().backward()
    held = sum(p.to_local().numel() for p in net.parameters())  # type: ignore[attr-defined]
    shards = [isinstance(p, DTensor) and p.grad is not None for p in net.parameters()]
    return held, [*shards, getattr(net[0].weight, GATHERS_AGAIN)]


def test_a_model_on_meta_becomes_shards_without_ever_being_whole(pools: Pools) -> None:
    whole = 2 * 8 * 16 * 9 + 16 + 8
    for held, facts in pools[2].run(materialised, Mesh(channel=2)):
        assert held <= whole / 2 + 8
        assert facts == [True] * 5


def sums_of_a_layer(mesh: Mesh) -> int:
    net = nn.Conv2d(8, 16, 3, padding=1)
    cut_channels(net, (2, 8, 6, 6), opened(mesh), {0: "data", 1: "channel"})
    x = shard(torch.randn(2, 8, 6, 6), opened(mesh), {0: "data", 1: "channel"})
    y = net(x)
    with opened(mesh).traffic.watch() as sent:
        y.backward(torch.randn(y.local.shape))
    return sent.calls["all_reduce"]


def test_weight_and_bias_share_one_sum(pools: Pools) -> None:
    assert pools[4].run(sums_of_a_layer, Mesh(data=2, channel=2)) == [1] * 4


def refusals_of_foreign_weights(mesh: Mesh) -> list[str]:
    """Errors of layers for DTensors cut for another mesh, and whether they sent anything first."""
    elsewhere = init_device_mesh("cpu", (2,))
    weight, gain = (distribute_tensor(torch.ones(s), elsewhere, [Shard(0)]) for s in ((4, 4, 3, 3), (4,)))
    x: Any = shard(torch.randn(1, 4, 6, 6), opened(mesh), {1: "channel"})
    said = []
    with opened(mesh).traffic.watch() as sent:
        for call in (lambda: F.conv2d(x, weight), lambda: F.group_norm(x, 2, gain)):
            with pytest.raises(UnsupportedError) as caught:
                call()
            said.append(str(caught.value))
    assert sent.bytes_total == 0
    return said


def test_weights_cut_for_another_mesh_are_refused_before_anything_is_sent(pools: Pools) -> None:
    for said in pools[2].run(refusals_of_foreign_weights, Mesh(channel=2)):
        assert all("is no cut weight of Mesh(channel=2); cut weights with `convmesh.cut_channels`." in s for s in said)
        assert len(said) == 2


@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if {"channel", "filter"} & {*mesh.axes}], ids=str)
def test_a_plan_with_the_same_cuts_decides_alike(mesh: Mesh) -> None:
    net = Bottleneck()
    bare = plan_channels(net, SAMPLE, mesh, natural_cut(mesh, 4))
    splits = {name: _split(mesh, name, name in bare.layers) for name in (*bare.layers, "norm")}
    planned = plan(net, SAMPLE, mesh, splits)
    algorithms = {name: cut.split.algorithm for name, cut in bare.layers.items()}
    assert {name: planned.split(name).algorithm for name in bare.layers} == algorithms


def _split(mesh: Mesh, layer: str, cuts_channels: bool) -> Split:
    present = lambda *axes: tuple(axis for axis in axes if axis in mesh.axes)  # noqa: E731
    return Split(
        sample=present("data"),
        height=present("height") if layer != "head" else (),
        channel=present("channel", "filter") if cuts_channels else (),
    )


class Twice(nn.Module):
    """A layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = self.first

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


def test_planning_leaves_a_layer_with_two_names_as_it_was() -> None:
    net = Twice()
    weight = net.first.weight
    assert [*plan_channels(net, (4, 4, 8, 8), Mesh(filter=2)).layers] == ["first"]
    plan(net, (4, 4, 8, 8), Mesh(filter=2), "filter")
    assert net.first.weight is weight
    assert not weight.is_meta


def test_a_layer_that_runs_unseen_keeps_its_weights_under_both_names() -> None:
    net = Twice().to("meta")
    weight, x = net.first.weight, torch.empty(4, 4, 8, 8, device="meta")
    spec, cut = Node("net", "opaque", "net", "Twice", (), ()), shard(x, dry_mesh(Mesh(data=2)), {0: "data"})
    assert run_opaque(net, spec, cut).shape == x.shape
    assert net.first.weight is weight
