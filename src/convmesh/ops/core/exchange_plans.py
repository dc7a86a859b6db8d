"""Exchange plans and layouts, cached by layout and operator."""

from __future__ import annotations

from functools import lru_cache

from convmesh.layout import ExchangePlan, Layout, Mesh, plan_conversion, plan_exchange
from convmesh.layout.layout import LAYOUTS_KEPT
from convmesh.layout.maps import DimMap, demand, out_shape

Maps = tuple[DimMap, ...]


@lru_cache(maxsize=LAYOUTS_KEPT)
def halo(source: Layout, work: Layout, maps: Maps, rank: int) -> ExchangePlan:
    """What `rank` must fetch of an input laid out as `source` to compute its box of an output laid out as `work`."""
    return plan_exchange(source, demand(work, maps, source.shape), rank)


@lru_cache(maxsize=LAYOUTS_KEPT)
def conversion(source: Layout, target: Layout, rank: int) -> ExchangePlan:
    return plan_conversion(source, target, rank)


@lru_cache(maxsize=LAYOUTS_KEPT)
def replicated_layout(mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    """The layout of a tensor that every rank holds whole."""
    return Layout.of(mesh, shape)


@lru_cache(maxsize=LAYOUTS_KEPT)
def output_layout(source: Layout, maps: Maps) -> Layout:
    """The output's layout when the axes stay on their dims."""
    return source.with_shape(out_shape(maps, source.shape))
