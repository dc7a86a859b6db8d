"""Dropout: masks by global index, the same on every mesh."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from convmesh import Mesh, UnsupportedError, shard
from convmesh.layout import Box, Span
from convmesh.ops import manual_seed
from convmesh.ops.core.masks import CHUNK, keep_mask
from convmesh.testing import natural_cut, opened
from convmesh.testing.strategies import batch_sizes, extents, spatial_dims
from tests.conftest import Pools
from tests.draws import draws
from tests.ops.grids import on_grids

CPU = torch.device("cpu")
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
CHANNELWISE = {1: nn.Dropout1d, 2: nn.Dropout2d, 3: nn.Dropout3d}

# The same functions for the type checker: here they take and return Sharded tensors.
drop: Any = F.dropout
alpha_drop: Any = F.alpha_dropout


def run(mesh: Mesh, shape: tuple[int, ...], layer: Any, seed: int, memory_format: Any) -> list[torch.Tensor]:
    """Two calls with one seed: their whole outputs, and the assembled gradients of the shards."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = values.to(memory_format=memory_format) if memory_format else values
    x = shard(values, opened(mesh), natural_cut(mesh, len(shape)))
    x.local.requires_grad_()
    manual_seed(x.mesh, seed)
    once, again = layer(x), layer(x)
    once.local.backward(once.local.detach() + 1)
    assert x.local.grad is not None
    return [t.gather().detach().contiguous() for t in (once, again, x.like(x.local.grad))]


def on_one_and_many(pools: Pools, mesh: Mesh, *args: Any) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    (single,) = pools[1].run(run, Mesh(), *args)
    return single, pools[mesh.size].run(run, mesh, *args)


@on_grids
@draws(10)
@given(data=st.data())
@pytest.mark.operator("dropout", "dropout, alpha_dropout; any p; the same mask on every mesh")
def test_mask_does_not_depend_on_the_mesh(mesh: Mesh, data: st.DataObject, pools: Pools) -> None:
    spatial = data.draw(spatial_dims(mesh))
    shape = (data.draw(batch_sizes(mesh)), 3, *data.draw(extents(spatial)))
    layer = data.draw(st.sampled_from([nn.Dropout, nn.AlphaDropout]))(data.draw(st.sampled_from([0.1, 0.5, 0.75])))
    memory_format = LAST.get(spatial) if data.draw(st.booleans()) else None
    single, many = on_one_and_many(pools, mesh, shape, layer, data.draw(st.integers(0, 2**40)), memory_format)
    for outputs in many:
        assert all(torch.equal(a, b) for a, b in zip(outputs, single, strict=True))


@on_grids
@given(data=st.data())
@pytest.mark.operator("dropout1d, dropout2d, dropout3d", "whole channels, feature_alpha_dropout too")
def test_channels_are_dropped_whole(mesh: Mesh, data: st.DataObject, pools: Pools) -> None:
    spatial = data.draw(spatial_dims(mesh))
    shape = (data.draw(batch_sizes(mesh)), 5, *data.draw(extents(spatial)))
    single, many = on_one_and_many(pools, mesh, shape, CHANNELWISE[spatial](0.5), data.draw(st.integers(0, 99)), None)
    for outputs in many:
        assert all(torch.equal(a, b) for a, b in zip(outputs, single, strict=True))
    kept = (single[0] != 0).flatten(2)
    assert torch.equal(kept.all(2), kept.any(2))
    layer = nn.FeatureAlphaDropout(0.5)
    single, many = on_one_and_many(pools, mesh, shape, layer, data.draw(st.integers(0, 99)), None)
    assert all(torch.equal(outputs[0], single[0]) for outputs in many)


def _values_and_gradients(p: float) -> None:
    x = torch.randn(4, 3, 50, dtype=torch.float64)
    leaf: Any = shard(x, opened(Mesh()), {})
    leaf.local.requires_grad_()
    manual_seed(leaf.mesh, 3)
    once, again = drop(leaf, p), drop(leaf, p)
    kept = once.local != 0
    assert torch.equal(once.local, torch.where(kept, x * (1 / (1 - p)), 0))
    assert not torch.equal(kept, again.local != 0)
    (grad,) = torch.autograd.grad(once.local.sum(), leaf.local)
    assert torch.equal(grad, kept.double() * (1 / (1 - p)))
    manual_seed(leaf.mesh, 3)
    assert torch.equal(drop(leaf, p).local, once.local)


def test_values_and_gradients(pools: Pools) -> None:
    pools[1].run(_values_and_gradients, 0.3)


def _alpha(p: float) -> None:
    x: Any = shard(torch.randn(100_000, generator=torch.Generator().manual_seed(0)), opened(Mesh()), {})
    out = alpha_drop(x, p, training=True).local
    dropped = out.unique(return_counts=True)[1].max().item()
    torch.testing.assert_close(dropped / x.numel(), p, atol=0.01, rtol=0)
    torch.testing.assert_close((out.mean().item(), out.std().item()), (0.0, 1.0), atol=0.02, rtol=0)


def test_alpha_dropout_keeps_mean_and_variance(pools: Pools) -> None:
    pools[1].run(_alpha, 0.2)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_fraction_dropped(p: float) -> None:
    n = 64 * 64 * 64
    dropped = 1 - keep_mask(Box.whole((64, 64, 64)), (64, 64, 64), 11, p, CPU).double().mean().item()
    assert abs(dropped - p) < 4 * (p * (1 - p) / n) ** 0.5  # four standard deviations


@pytest.mark.parametrize("shape", [(64, 64, 64), (512, 2, 256), (8192, 32), (2**18,), (2**15, 8, 1)])
def test_neighbours_seeds_and_rows_are_uncorrelated(shape: tuple[int, ...]) -> None:
    mask = keep_mask(Box.whole(shape), shape, 1, 0.5, CPU).double() - 0.5
    other = keep_mask(Box.whole(shape), shape, 2, 0.5, CPU).double() - 0.5
    limit = 5 / mask.numel() ** 0.5
    assert abs(4 * (mask * other).mean().item()) < limit
    for dim, extent in enumerate(shape):
        for distance in (1, 2, 3, 16, extent // 2):
            if 0 < distance < extent:
                pairs = mask.narrow(dim, distance, extent - distance) * mask.narrow(dim, 0, extent - distance)
                assert abs(4 * pairs.mean().item()) < 5 / pairs.numel() ** 0.5, f"dim {dim}, distance {distance}"


def test_every_pair_of_columns_and_of_rows_is_uncorrelated() -> None:
    """With too little mixing, columns or rows repeat each other."""
    mask = keep_mask(Box.whole((2048, 256)), (2048, 256), 5, 0.5, CPU).double() * 2 - 1
    for pairs, samples in ((mask.T @ mask / 2048, 2048), (mask @ mask.T / 256, 256)):
        assert pairs.fill_diagonal_(0).abs().max().item() < 6 / samples**0.5


@given(data=st.data())
@settings(max_examples=30)
def test_mask_of_a_box_is_that_part_of_the_whole(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
    box = Box(tuple(Span(a, b) for a, b in ends))
    whole = keep_mask(Box.whole(shape), shape, 7, 0.5, CPU)
    assert torch.equal(keep_mask(box, shape, 7, 0.5, CPU), whole[box.slices()])


def test_masks_do_not_depend_on_the_chunk_size() -> None:
    shape = (3, CHUNK["cpu"] // 2)
    whole = keep_mask(Box.whole(shape), shape, 7, 0.5, CPU)
    for row in range(3):
        box = Box((Span(row, row + 1), Span(0, shape[1])))
        assert torch.equal(keep_mask(box, shape, 7, 0.5, CPU), whole[row : row + 1])


def test_indices_beyond_32_bits_count() -> None:
    """Rows that differ by 2³² have different masks."""
    shape, far = (2**34, 64), 2**32
    near, away = (keep_mask(Box((Span(s, s + 4), Span(0, 64))), shape, 7, 0.5, CPU) for s in (0, far))
    assert not torch.equal(near, away)


def bits_in_plain_integers(seed: int, row: int, column: int) -> int:
    """The hash of one element in unbounded unsigned integers."""
    key = (row * 0x9E3779B97F4A7C15 + seed) % 2**64
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    key = (key ^ key >> 27) * 0x94D049BB133111EB % 2**64
    key ^= key >> 31
    bits = key % 2**32 ^ column * 0x9E3779B1 % 2**32
    bits = (bits ^ bits >> 16) * 0x85EBCA6B % 2**32 ^ key >> 32
    return (bits ^ bits >> 13) * 0xC2B2AE35 % 2**32


@given(seed=st.integers(0, 2**62 - 1), row=st.integers(0, 2**40), column=st.integers(0, 2**31 - 2), p=st.floats(0, 1))
@settings(max_examples=100)
def test_the_hash_equals_that_of_plain_integers(seed: int, row: int, column: int, p: float) -> None:
    """A seed fixes the masks: a run resumed elsewhere must see the same ones."""
    box = Box((Span(row, row + 1), Span(column, column + 1)))
    kept = keep_mask(box, (2**41, 2**31), seed, p, CPU).item()
    # Unsigned bits compared with p · 2³², expressed in torch's signed bits.
    signed = (bits_in_plain_integers(seed, row, column) + 2**31) % 2**32
    assert kept == (signed >= min(round(p * 2**32), 2**32 - 1))


def _edges() -> None:
    mesh = opened(Mesh(height=2))
    x: Any = shard(torch.ones(2, 3, 5), mesh, {2: "height"})
    state = mesh.seeds.get_state()
    assert F.dropout(x, 0.0) is x
    assert F.dropout(x, 0.5, training=False) is x
    assert nn.Dropout(0.5).eval()(x) is x
    assert torch.equal(mesh.seeds.get_state(), state)
    assert not drop(x, 1.0).gather().any()
    assert not alpha_drop(x, 1.0, True).gather().any()
    changed = nn.Dropout(0.9, inplace=True)(x)
    assert changed is x
    assert (x.gather() == 0).any()
    with pytest.raises(ValueError, match=r"`p` \(=1.5\) must be a probability"):
        F.dropout(x, 1.5)
    with pytest.raises(UnsupportedError, match=r"dropout2d has shape \(2, 3, 5\), .* channels and 2 spatial dims"):
        F.dropout2d(x, 0.5)


def test_edges(pools: Pools) -> None:
    pools[2].run(_edges)
