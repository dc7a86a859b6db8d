"""Local transposed convolutions: adjacent blocks are a matrix product, with the same numbers as the general kernel."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from convmesh import Mesh
from convmesh.kernels.conv_params import ConvParams
from convmesh.kernels.local_conv_transpose import conv_transpose
from convmesh.testing import RankPool, SplitCase
from convmesh.testing.strategies import extents, spatial_dims
from tests.ops.grids import on_grids

Check = Callable[[SplitCase], None]
TRANSPOSED: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def transposed(x: Any, weight: Any, bias: Any = None, *, stride: tuple[int, ...], padding: int = 0) -> Any:
    return TRANSPOSED[weight.dim() - 2](x, weight, bias, stride=stride, padding=padding)


@on_grids
@given(data=st.data())
def test_blocks_on_any_shards(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    """Kernel as wide as the stride, float32; padding crops blocks, and uneven shards need parts of them."""
    spatial = data.draw(spatial_dims(mesh))
    kernel = tuple(data.draw(st.integers(1, 3)) for _ in range(spatial))
    padding = data.draw(st.integers(0, min(kernel) - 1))
    shape = (data.draw(st.integers(1, 2)), 3, *data.draw(extents(spatial, smallest=2, largest=7)))
    params = ((3, 2, *kernel), (2,))[: data.draw(st.integers(1, 2))]
    fn = partial(transposed, stride=kernel, padding=padding)
    layout = data.draw(st.sampled_from([torch.contiguous_format, torch.channels_last, torch.channels_last_3d]))
    check(SplitCase(fn, mesh, (shape,), params, dtype=torch.float32, memory_format=layout))


def names_and_format(kernel: int) -> tuple[set[str], bool]:
    x = torch.randn(1, 4, 4, 4, 4).contiguous(memory_format=torch.channels_last_3d)
    params = ConvParams((2,) * 3, (0,) * 3, (1,) * 3, 1)
    with torch.profiler.profile(acc_events=True) as seen:
        y = conv_transpose(x, torch.randn(4, 4, *[kernel] * 3), None, params, "cpu")
    return {event.name for event in seen.events()}, y.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_blocks_are_one_product_and_stay_channels_last(pools: dict[int, RankPool]) -> None:
    ((names, is_last),) = pools[1].run(names_and_format, 2)
    assert is_last
    assert not {name for name in names if "transpose3d" in name}
