"""Mistakes that earlier systems for split convolution made, one test each."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from convmesh import Layout, Mesh, Sharded, open_mesh, shard
from convmesh.dist import StepSettings
from convmesh.testing import RankPool, SplitCase, check_split, opened, run_ranks

Pools = dict[int, RankPool]


def split(pools: Pools, fn: Any, mesh: Mesh, x: tuple[int, ...], *params: tuple[int, ...], **options: Any) -> None:
    pools[mesh.size].run(SplitCase.check, SplitCase(fn, mesh, (x,), params, **options))


def conv2d(x: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
    return F.conv2d(x, weight, bias, **options)


def test_1_gradients_of_halos_are_sent_back_and_added(pools: Pools) -> None:
    """Without them, the gradient of the rows next to a cut is too small."""
    split(pools, partial(conv2d, padding=2), Mesh(height=4), (1, 2, 12, 5), (3, 2, 5, 5))


def corner_value(mesh: Mesh, overlap: bool) -> list[float]:
    """A single 1 next to the crossing of both cuts, seen by a 3×3 kernel of ones from the diagonal shard."""
    x = torch.zeros(1, 1, 8, 8, dtype=torch.float64)
    x[0, 0, 3, 3] = 1
    cut = shard(x, opened(mesh).with_settings(StepSettings(overlap=overlap)), {2: "height", 3: "width"})
    y = F.conv2d(cut, torch.ones(1, 1, 3, 3).double(), padding=1)  # type: ignore[call-overload]
    return [y.gather()[0, 0, 4, 4].item(), y.gather().sum().item()]


@pytest.mark.parametrize("overlap", [True, False])
def test_2_corners_arrive_with_and_without_overlap(overlap: bool) -> None:
    assert run_ranks(4, corner_value, Mesh(height=2, width=2), overlap) == [[1.0, 9.0]] * 4


@pytest.mark.parametrize("extent", [16, 17, 18, 19, 23])
@pytest.mark.parametrize(("kernel", "padding"), [(3, 1), (3, 0), (7, 3), (4, 1), (2, 0)])
def test_3_strides_make_halos_differ_by_side_and_rank(extent: int, kernel: int, padding: int, pools: Pools) -> None:
    fn = partial(conv2d, stride=2, padding=padding)
    for mesh in (Mesh(height=2), Mesh(height=3)):
        split(pools, fn, mesh, (1, 2, extent, 7), (3, 2, kernel, kernel))


def circular(x: Any, weight: Any) -> Any:
    return F.conv2d(F.pad(x, (1, 1, 1, 1), "circular"), weight)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_4_padding_is_only_at_global_borders_and_periodic_borders_wrap(ranks: int, pools: Pools) -> None:
    """With two shards both halos come from the same peer."""
    split(pools, partial(conv2d, padding=1), Mesh(height=ranks), (1, 2, 9, 6), (2, 2, 3, 3))
    split(pools, circular, Mesh(height=ranks), (1, 2, 9, 6), (2, 2, 3, 3))


def weight_gradient(mesh: Mesh) -> float:
    """With ones everywhere, each tap's gradient counts the outputs whose tap is inside; the middle tap counts all."""
    x = shard(torch.ones(1, 1, 9, 4).double(), opened(mesh), {2: "height"})
    weight = torch.zeros(1, 1, 3, 1).double().requires_grad_()
    y = F.conv2d(x, weight, padding=(1, 0))  # type: ignore[call-overload]
    y.backward(torch.ones_like(y.local))
    assert weight.grad is not None
    return float((weight.grad.flatten() - torch.tensor([32.0, 36.0, 32.0])).abs().max())


def test_5_boundary_taps_of_the_weight_gradient_count_once(pools: Pools) -> None:
    assert pools[3].run(weight_gradient, Mesh(height=3)) == [0.0] * 3


def mean_of_everything(x: Any, weight: Any) -> Any:
    return F.mse_loss(F.conv2d(x, weight, padding=1), x)


@pytest.mark.parametrize("samples", [2, 3, 5])
def test_6_gradients_are_those_of_the_global_mean(samples: int, pools: Pools) -> None:
    """Neither a factor for the spatial ranks nor one for unequal local batches."""
    split(pools, mean_of_everything, Mesh(data=2, height=2), (samples, 2, 5, 6), (2, 2, 3, 3))


def norms_pools_and_losses(x: Any, gain: Any, bias: Any) -> Any:
    y = F.batch_norm(x, None, None, gain, bias, training=True) + F.group_norm(x, 2) + F.instance_norm(x)
    return F.mse_loss(F.max_pool2d(y, 3, 1, 1) + F.avg_pool2d(y, 3, 1, 1), x)


def test_7_statistics_windows_and_means_span_all_shards(pools: Pools) -> None:
    split(pools, norms_pools_and_losses, Mesh(height=2, width=2), (2, 4, 7, 5), (4,), (4,))


def on_the_second_half() -> None:
    if dist.get_rank() >= 2:
        mesh = open_mesh(Mesh(height=2), ranks=[2, 3])
        generator = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(s, generator=generator).double() for s in ((1, 1, 6, 4), (1, 1, 3, 3)))
        check_split(partial(conv2d, padding=1), [x], [weight], mesh, [{2: "height"}])


def test_8_peers_are_counted_within_the_mesh() -> None:
    run_ranks(4, on_the_second_half)


def halo_bytes(mesh: Mesh, autocast: bool) -> int:
    x = shard(torch.randn(1, 2, 8, 6), opened(mesh), {2: "height"})
    x = x.like(x.local.contiguous(memory_format=torch.channels_last))
    with opened(mesh).traffic.watch() as sent, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = F.conv2d(x, torch.randn(2, 2, 3, 3), padding=1)  # type: ignore[call-overload]
    assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
    return sent.bytes_sent["neighbour"]


def test_9a_casts_come_before_halos_and_channels_last_travels(pools: Pools) -> None:
    assert pools[2].run(halo_bytes, Mesh(height=2), False) == [2 * 6 * 4] * 2
    assert pools[2].run(halo_bytes, Mesh(height=2), True) == [2 * 6 * 2] * 2


def recomputed(mesh: Mesh) -> None:
    def block(local: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(x.like(local), weight, padding=1)  # type: ignore[call-overload]
        result: torch.Tensor = F.group_norm(F.relu(y), 1).local  # type: ignore[attr-defined]
        return result

    x = shard(torch.randn(1, 2, 7, 6).double(), opened(mesh), {2: "height"})
    grads = []
    for run in (block, partial(checkpoint, block, use_reentrant=False)):
        leaves = [x.local.clone().requires_grad_(), torch.ones(2, 2, 3, 3).double().requires_grad_()]
        grads.append(torch.autograd.grad(run(*leaves).square().sum(), leaves))
    for plain, again in zip(*grads, strict=True):
        assert torch.equal(plain, again)


def test_9b_recomputation_replays_the_same_transfers(pools: Pools) -> None:
    pools[3].run(recomputed, Mesh(height=3))


def test_10_ranks_with_nothing_still_take_part(pools: Pools) -> None:
    split(pools, partial(conv2d, padding=1), Mesh(data=2, height=4), (1, 2, 3, 5), (2, 2, 3, 3), (2,))
    split(pools, partial(conv2d, padding=1), Mesh(height=8), (1, 2, 3, 5), (2, 2, 3, 3), (2,))


def test_11_groups_and_depthwise_are_exact_with_space_or_channels_cut(pools: Pools) -> None:
    split(pools, partial(conv2d, padding=1, groups=4), Mesh(height=2, width=2), (1, 4, 6, 7), (4, 1, 3, 3))
    split(pools, partial(conv2d, padding=2, groups=2, dilation=2), Mesh(height=3), (1, 4, 9, 7), (6, 2, 3, 3))
    split(pools, partial(conv2d, groups=4), Mesh(channel=2), (1, 4, 6, 7), (4, 1, 3, 3), cuts=({1: "channel"},))


def masked(mesh: Mesh) -> torch.Tensor:
    opened(mesh).seeds.manual_seed(5)
    x: Sharded = shard(torch.ones(4, 2, 6, 6), opened(mesh), {0: "data", 2: "height"})
    kept: Any = F.dropout(x, 0.5)  # type: ignore[arg-type]
    return kept.gather()  # type: ignore[no-any-return]


def test_12_ranks_of_a_sample_group_see_the_same_samples_and_random_numbers(pools: Pools) -> None:
    mesh = Mesh(data=2, height=2)
    layout = Layout.of(mesh, (5, 1, 8), {0: "data", 2: "height"})
    samples = [layout.box(rank).spans[0] for rank in range(4)]
    assert samples[0] == samples[1]
    assert samples[2] == samples[3]
    alone = pools[1].run(masked, Mesh())[0]
    assert all(torch.equal(mask, alone) for mask in pools[4].run(masked, mesh))
