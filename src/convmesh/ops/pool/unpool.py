"""Max unpooling, 1D to 3D: values go to the indices that max pooling returned, zeros everywhere else."""

from __future__ import annotations

import math
from functools import lru_cache, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from convmesh.dist import all_reduce
from convmesh.errors import UnsupportedError
from convmesh.layout import Box, Layout, Span
from convmesh.layout.maps import DimMap, Same, Transposed, Whole
from convmesh.ops.core.empty_result import empty_result
from convmesh.ops.core.exchange_plans import Maps
from convmesh.ops.core.fetch import fetch
from convmesh.ops.core.per_dim import Ints
from convmesh.ops.core.probe import probe_of
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded, on_mesh
from convmesh.ops.pool.flat_index import ravel, unravel
from convmesh.ops.pool.pool_windows import Numbers, Pooling


def max_unpool(
    dims: int,
    input: Sharded,  # noqa: A002 - torch's name
    indices: Sharded | torch.Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    output_size: Ints | None = None,
) -> Sharded:
    """Every rank places the values whose indices fall into its box of the output."""
    pooling = Pooling.of(dims, kernel_size, stride, padding)
    size = output_size if output_size is None or isinstance(output_size, int) else tuple(output_size)
    shape = _unpooled_shape(input.shape, indices.shape, indices.dtype, pooling, size)
    work = input.layout.with_shape(shape)
    places = on_mesh(indices, input.mesh).redistribute(input.layout)
    if not input.layout.axes_of(range(-dims, 0)):
        return Sharded(_whole(input.local, places.local, pooling, work.box(input.mesh.rank)), work, input.mesh)
    maps = _maps(input, places, pooling, shape[-dims:])
    values, flat = fetch(input, work, maps), fetch(places, work, maps)
    return Sharded(_placed(values, flat, dims, work, input.mesh.rank), work, input.mesh)


@lru_cache(maxsize=1024)
def _unpooled_shape(
    shape: torch.Size,
    indices_shape: torch.Size,
    dtype: torch.dtype,
    pooling: Pooling,
    output_size: int | Numbers | None,
) -> torch.Size:
    """The output's shape; arguments that torch refuses raise its own error on every rank."""
    unpool = getattr(F, f"max_unpool{pooling.dims}d")
    result: torch.Tensor = unpool(
        probe_of(shape), probe_of(indices_shape, dtype), pooling.kernel, pooling.stride, pooling.padding, output_size
    )
    return result.shape


def _maps(x: Sharded, places: Sharded, pooling: Pooling, extents: torch.Size) -> Maps:
    """Each rank needs the values whose windows overlap its box, or all if some index is outside its window."""
    each = zip(pooling.kernel, pooling.stride, pooling.padding, strict=True)
    spatial: list[DimMap] = [Transposed(k, s, padding=p) for k, s, p in each]
    if _any_strays(places, pooling, extents):
        spatial = [Whole(n) for n in extents]
    return (*[Same()] * (x.dim() - pooling.dims), *spatial)


def _any_strays(places: Sharded, pooling: Pooling, extents: torch.Size) -> bool:
    """Whether any index on any rank is outside its window. Refuses indices outside the output."""
    flat = places.local
    beyond = (flat < 0) | (flat >= math.prod(extents))
    strays = beyond
    for dim, coordinate in enumerate(unravel(flat, extents), start=-pooling.dims):
        window = pooling.windows[dim]
        starts = torch.arange(*places.box.spans[dim], device=flat.device) * window.stride - window.low
        offset = coordinate - starts.view(-1, *[1] * (-1 - dim))
        strays = strays | (offset < 0) | (offset >= window.kernel)
    flags = torch.stack([strays.any(), beyond.any()]).long()
    everywhere = all_reduce(flags, places.mesh, places.layout.axes, dist.ReduceOp.MAX)
    if places.mesh.is_dry:
        return False  # as if pooling with these windows gave the indices
    any_strays, any_beyond = everywhere.tolist()
    if any_beyond:
        raise UnsupportedError(
            f"`indices` must be between 0 and {math.prod(extents) - 1} for an output of spatial extents "
            f"{tuple(extents)}; pass the `output_size` of the tensor that was pooled."
        )
    return bool(any_strays)


def _whole(values: torch.Tensor, flat: torch.Tensor, pooling: Pooling, out: Box) -> torch.Tensor:
    """Torch's own unpooling, where space is not cut."""
    if not out.size:
        return empty_result(values, out.shape)
    unpool = getattr(F, f"max_unpool{pooling.dims}d")
    size = out.shape[-pooling.dims :]
    result: torch.Tensor = unpool(values, flat, pooling.kernel, pooling.stride, pooling.padding, size)
    return result


def _placed(values: torch.Tensor, flat: torch.Tensor, dims: int, work: Layout, rank: int) -> torch.Tensor:
    """This rank's box of the output, from the values and indices that may fall into it."""
    out = work.box(rank)
    if not out.size or not values.numel():
        return empty_result(values, out.shape)
    box = out.shape[-dims:]
    targets = _in_box(flat, work.shape[-dims:], out.spans[-dims:])
    # All of space as one line, plus one index at the end for the values that belong to other ranks.
    lines = [t.flatten(-dims).unsqueeze(-1) for t in (values, targets)]
    filled: torch.Tensor = torch.ops.aten.max_unpool2d(*lines, (math.prod(box) + 1, 1))
    return filled[..., :-1, 0].view(out.shape)


def _in_box(flat: torch.Tensor, extents: Numbers, spans: tuple[Span, ...]) -> torch.Tensor:
    """Flat indices into a box; those outside it point just past its end."""
    coordinates = [c - span.start for c, span in zip(unravel(flat, extents), spans, strict=True)]
    box = [span.extent for span in spans]
    inside = torch.ones_like(flat, dtype=torch.bool)
    for coordinate, extent in zip(coordinates, box, strict=True):
        inside &= (coordinate >= 0) & (coordinate < extent)
    return torch.where(inside, ravel(coordinates, box), math.prod(box))


for _dims in (1, 2, 3):
    implements(getattr(F, f"max_unpool{_dims}d"))(partial(max_unpool, _dims))
