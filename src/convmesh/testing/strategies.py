"""Hypothesis strategies for shapes and shards, the awkward ones included."""

from __future__ import annotations

from hypothesis import strategies as st

from convmesh.layout import Mesh
from convmesh.testing.case import SPATIAL_AXES


def spatial_dims(mesh: Mesh) -> st.SearchStrategy[int]:
    """How many spatial dims a tensor may have so that every axis of `mesh` cuts one of them."""
    fewest = max((3 - SPATIAL_AXES.index(name) for name in mesh.axes if name in SPATIAL_AXES), default=1)
    return st.integers(fewest, 3)


def extents(dims: int, smallest: int = 1, largest: int = 12) -> st.SearchStrategy[tuple[int, ...]]:
    """Spatial extents: divisible and not, thinner than a halo, fewer than the ranks."""
    return st.tuples(*[st.integers(smallest, largest)] * dims)


def batch_sizes(mesh: Mesh) -> st.SearchStrategy[int]:
    """Samples, possibly fewer than the ranks of the data axis."""
    return st.integers(1, 3 if "data" in mesh.axes else 2)
