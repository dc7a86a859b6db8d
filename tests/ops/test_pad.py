"""Padding and cropping."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from convmesh import Mesh, shard
from convmesh.testing import RankPool, SplitCase, opened
from convmesh.testing.strategies import batch_sizes, extents, spatial_dims
from tests.draws import draws
from tests.ops.grids import on_grids

Check = Callable[[SplitCase], None]


def padded(x: Any, amounts: tuple[int, ...], mode: str, value: float | None = None) -> Any:
    return F.pad(x, amounts, mode, value)


def by_module(x: Any, name: str, amounts: tuple[int, ...]) -> Any:
    kind = getattr(nn, f"{name}Pad{x.dim() - 2}d")
    return kind(amounts, 1.5)(x) if name == "Constant" else kind(amounts)(x)


@on_grids
@given(data=st.data())
@draws(15)
@pytest.mark.operator("pad, constant", "any dims, samples and channels too; asymmetric; negative (crop); any value")
def test_constant(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = (data.draw(batch_sizes(mesh)), 2, *data.draw(extents(data.draw(spatial_dims(mesh)))))
    dims = data.draw(st.integers(1, len(shape)))
    amounts = data.draw(st.tuples(*[st.integers(-4, 6)] * (2 * dims)))
    pairs = zip(amounts[::2], amounts[1::2], reversed(shape), strict=False)
    assume(all(n + low >= 0 and n + high >= 0 and n + low + high > 0 for low, high, n in pairs))
    value = data.draw(st.sampled_from([None, 0.0, -2.5]))
    check(SplitCase(partial(padded, amounts=amounts, mode="constant", value=value), mesh, (shape,)))


@on_grids
@given(data=st.data())
@draws(20)
@pytest.mark.operator("pad, reflect, replicate, circular", "1D to 3D; asymmetric; negative (crop)")
def test_borders(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    mode = data.draw(st.sampled_from(["reflect", "replicate", "circular"]))
    shape = (data.draw(batch_sizes(mesh)), 2, *data.draw(extents(data.draw(spatial_dims(mesh)), smallest=2)))
    amounts: list[int] = []
    for extent in reversed(shape[2:]):
        most = {"reflect": extent - 1, "replicate": 6, "circular": extent}[mode]
        low, high = data.draw(st.tuples(*[st.integers(1 - extent, most)] * 2))
        assume(extent + low + high > 0)
        # torch wraps circular borders around the cropped input, and reads uninitialised memory if that is smaller.
        assume(mode != "circular" or max(low, high) <= extent + min(low, 0) + min(high, 0))
        amounts += [low, high]
    check(SplitCase(partial(padded, amounts=tuple(amounts), mode=mode), mesh, (shape,)))


@on_grids
@given(data=st.data())
@pytest.mark.operator("nn.ConstantPad, ZeroPad, ReflectionPad, ReplicationPad, CircularPad", "1d, 2d, 3d")
def test_modules(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    name = data.draw(st.sampled_from(["Constant", "Zero", "Reflection", "Replication", "Circular"]))
    spatial = data.draw(spatial_dims(mesh))
    shape = (data.draw(batch_sizes(mesh)), 2, *data.draw(extents(spatial, smallest=4)))
    amounts = data.draw(st.tuples(*[st.integers(0, 3)] * (2 * spatial)))
    formats = [torch.contiguous_format, torch.channels_last, torch.channels_last_3d]
    fn = partial(by_module, name=name, amounts=amounts)
    check(SplitCase(fn, mesh, (shape,), memory_format=data.draw(st.sampled_from(formats))))


def refused() -> None:
    image: Any = shard(torch.ones(1, 1, 6, 4), opened(Mesh(height=2)), {2: "height"})
    with pytest.raises(RuntimeError, match=r"`pad` on .* Unrecognised padding mode"):
        padded(image, (1, 1), "mirror")
    with pytest.raises(RuntimeError, match="Padding size should be less than"):
        padded(image, (4, 0, 0, 0), "reflect")
    with pytest.raises(RuntimeError, match="wrapping around more than once"):
        padded(image, (0, 0, 7, 0), "circular")
    with pytest.raises(NotImplementedError, match="at most 2 for circular padding of extent 2"):
        padded(image, (0, 0, -4, 3), "circular")


def test_refusals(pools: dict[int, RankPool]) -> None:
    pools[2].run(refused)
