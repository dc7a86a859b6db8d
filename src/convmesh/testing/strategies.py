"""Hypothesis strategies for shapes and shards, awkward ones included."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from convmesh.layout import AXES, Cut, Layout, Mesh, Partition
from convmesh.layout.mesh import SPACE_AXES


def spatial_dims(mesh: Mesh) -> st.SearchStrategy[int]:
    """How many spatial dims a tensor may have so that every axis of `mesh` cuts one of them."""
    fewest = max((3 - SPACE_AXES.index(name) for name in mesh.axes if name in SPACE_AXES), default=1)
    return st.integers(fewest, 3)


def extents(dims: int, smallest: int = 1, largest: int = 12) -> st.SearchStrategy[tuple[int, ...]]:
    """Spatial extents: divisible and not, thinner than a halo, fewer than the ranks."""
    return st.tuples(*[st.integers(smallest, largest)] * dims)


def batch_sizes(mesh: Mesh) -> st.SearchStrategy[int]:
    """Samples, possibly fewer than the ranks of the data axis."""
    return st.integers(1, 3 if "data" in mesh.axes else 2)


def meshes(largest_size: int = 12) -> st.SearchStrategy[Mesh]:
    """Meshes of up to three axes."""
    names = st.lists(st.sampled_from(AXES), unique=True, max_size=3)
    sizes = names.flatmap(lambda chosen: st.fixed_dictionaries({name: st.integers(1, 4) for name in chosen}))
    return sizes.map(lambda axes: Mesh(**axes)).filter(lambda mesh: mesh.size <= largest_size)


def partitions(extent: int, parts: int) -> st.SearchStrategy[Partition]:
    """Even and uneven cuts, including empty parts."""
    inner = st.lists(st.integers(0, extent), min_size=parts - 1, max_size=parts - 1).map(sorted)
    return st.just(Partition.even(extent, parts)) | inner.map(lambda bounds: Partition([0, *bounds, extent]))


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, shape: Sequence[int]) -> Layout:
    """Any layout of a tensor: axes that replicate it, several axes on one dim in any order, even and uneven cuts."""
    axes_of: list[list[str]] = [[] for _ in shape]
    for name in draw(st.permutations(tuple(mesh.axes))):
        dim = draw(st.integers(0, len(shape)))
        if dim < len(shape):
            axes_of[dim].append(name)
    cuts = zip(axes_of, shape, strict=True)
    return Layout(mesh, [Cut(tuple(axes), draw(partitions(n, mesh.extent(axes)))) for axes, n in cuts])
