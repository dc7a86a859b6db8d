"""Strategies on meshes of every shape for a number of ranks, and why some are refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from convmesh.graph import Graph, Node
from convmesh.layout import Mesh
from convmesh.layout.mesh import CHANNEL_AXES, SPACE_AXES, space_axes
from convmesh.oracle.search.refusal import Refusal, RefusalKind
from convmesh.plans import Program, Split, Work, preset, split_nodes
from convmesh.plans.layer_extents import filters_of, rows_of
from convmesh.plans.presets import AXES_OF
from convmesh.plans.shared_weights import may_cut
from convmesh.plans.stage_graph import StageGraph

MOST_FREED = 1024
"""Ranks that may switch together from cutting space to another dim: planning the exchange of more takes seconds."""

MOST_IDLE = 0.1
"""Share of a network's arithmetic that an axis may leave uncut."""


@dataclass(frozen=True)
class Candidate:
    """A named strategy on a mesh."""

    strategy: str
    mesh: Mesh


def axes_of(strategy: str, spatial_dims: int) -> tuple[str, ...]:
    """The mesh axes of a strategy for inputs with `spatial_dims` dims of space."""
    space = space_axes(spatial_dims)
    return tuple(name for part in strategy.split("+") for name in (space if part == "spatial" else AXES_OF[part]))


def factorisations(ranks: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """All ways to write a number of ranks as a product over axes."""
    if not axes:
        if ranks == 1:
            yield {}
        return
    for first in _divisors(ranks):
        yield from ({axes[0]: first, **rest} for rest in factorisations(ranks // first, axes[1:]))


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


class Candidates:
    """Strategies on meshes for one network; `alone`, the program of one device, gives each layer's arithmetic."""

    def __init__(self, graph: Graph, alone: Program) -> None:
        self.graph = graph
        self._flops: dict[str, int] = {}
        for node in alone.nodes:
            steps = (*node.forward, *node.backward)
            self._flops[node.layer] = self._flops.get(node.layer, 0) + sum(
                step.flops for step in steps if isinstance(step, Work)
            )
        self.shape = graph.inputs[0].outputs[0].shape

    @property
    def batch(self) -> int:
        return self.shape[0]

    @cached_property
    def _space(self) -> dict[str, int]:
        """Extents of the input by the axis that cuts them."""
        extents = self.shape[2:]
        return dict(zip(space_axes(len(extents)), extents, strict=True))

    def of(self, strategy: str, ranks: int) -> list[Candidate]:
        """The strategy on every mesh of `ranks` ranks that gives each of its parts work.

        Of meshes that differ only in which of several equal extents they cut further, one is listed: it cuts the outer
        dims further, so its halos are contiguous in memory.
        """
        parts = strategy.split("+")
        candidates = []
        for sizes in factorisations(ranks, axes_of(strategy, len(self._space))):
            idle = [part for part in parts if all(sizes.get(name, 1) == 1 for name in AXES_OF[part])]
            if (not idle or ranks == 1) and self._is_canonical(sizes):
                candidates.append(Candidate(strategy, Mesh(**sizes)))
        return candidates

    def _is_canonical(self, sizes: Mapping[str, int]) -> bool:
        names = [name for name in self._space if name in sizes]
        pairs = ((a, b) for at, a in enumerate(names) for b in names[at + 1 :])
        return all(sizes[a] >= sizes[b] for a, b in pairs if self._space[a] == self._space[b])

    def refusal(self, candidate: Candidate) -> Refusal | None:
        """Why a strategy cannot use all ranks of a mesh, or is not evaluated there; None if it is."""
        mesh = candidate.mesh
        if refusal := self._samples(mesh) or self._stages(mesh):
            return refusal
        splits = preset(candidate.strategy, self.graph, mesh).splits
        if candidate.strategy == "hybrid":
            return self._few_dense(mesh, splits)
        return self._idle_axes(mesh, splits) or self._many_freed(mesh, splits)

    def _samples(self, mesh: Mesh) -> Refusal | None:
        ranks = mesh.axes.get("data", 1)
        if ranks <= self.batch:
            return None
        return Refusal(kind=RefusalKind.SAMPLES, subject="data", needed=ranks, limit=self.batch)

    def _stages(self, mesh: Mesh) -> Refusal | None:
        ranks = mesh.axes.get("pipe", 1)
        if ranks <= self._most_stages:
            return None
        return Refusal(kind=RefusalKind.STAGES, subject="pipe", needed=ranks, limit=self._most_stages)

    @cached_property
    def _most_stages(self) -> int:
        return len(StageGraph.of(self.graph).places) + 1

    def _idle_axes(self, mesh: Mesh, splits: Mapping[str, Split]) -> Refusal | None:
        """Refuse an axis without work: of space at the first layer, of any kind in much of the arithmetic."""
        for axis, ranks in mesh.axes.items():
            if axis in SPACE_AXES and (why := self._short_extent(axis, ranks, splits)):
                return why
            if axis in CHANNEL_AXES and (why := self._few_channels(axis, ranks, splits)):
                return why
        return None

    def _short_extent(self, axis: str, ranks: int, splits: Mapping[str, Split]) -> Refusal | None:
        first = next(iter(splits))
        if axis not in getattr(splits[first], axis):
            return self._few_rows(axis, ranks, self.graph.layer(first)[0])
        nodes = [*split_nodes(self.graph)]
        idle = [node for node in nodes if axis not in splits[node.layer].axes]
        if self._work(idle) <= MOST_IDLE * self._work(nodes):
            return None
        return self._few_rows(axis, ranks, idle[0], ", and too few samples and filters")

    def _few_rows(self, axis: str, ranks: int, node: Node, detail: str = "") -> Refusal:
        extent = self._rows(node, axis)
        return Refusal(kind=RefusalKind.ROWS, subject=axis, needed=ranks, limit=extent, layer=node.layer, detail=detail)

    def _many_freed(self, mesh: Mesh, splits: Mapping[str, Split]) -> Refusal | None:
        """Ranks that stop cutting space at a layer all exchange with each other there."""
        for layer, split in splits.items():
            axes = [axis for axis in mesh.axes if axis in SPACE_AXES and axis not in getattr(split, axis)]
            if mesh.extent(axes) > MOST_FREED:
                detail = f": space ends at {layer}, where {mesh.extent(axes)} ranks would exchange with each other"
                return Refusal(kind=RefusalKind.NOT_EVALUATED, detail=detail)
        return None

    def _rows(self, node: Node, axis: str) -> int:
        """Rows that ranks along an axis of space share in a layer; 1 where there is no space."""
        given = self.graph.node(node.inputs[0]).outputs[0].shape
        return rows_of(node, given).get(axis, 1)

    def _few_channels(self, axis: str, ranks: int, splits: Mapping[str, Split]) -> Refusal | None:
        """Refuse with the first layer that has too few filters, if such layers do much of the work."""
        nodes = [node for node in split_nodes(self.graph) if may_cut(self.graph, node)]
        uncut = [node for node in nodes if axis not in splits[node.layer].channel]
        if self._work(uncut) <= MOST_IDLE * self._work(nodes):
            return None
        return _few_filters(axis, ranks, uncut[0])

    def _work(self, nodes: Iterable[Node]) -> int:
        return sum(self._flops.get(layer, 0) for layer in {node.layer for node in nodes})

    def _few_dense(self, mesh: Mesh, splits: Mapping[str, Split]) -> Refusal | None:
        dense = [node for node in split_nodes(self.graph) if node.kind == "linear"]
        if not dense:
            return Refusal(kind=RefusalKind.DENSE, subject="hybrid")
        if mesh.size == 1 or any(splits[node.layer].channel for node in dense):
            return None
        return _few_filters("hybrid", mesh.size, dense[-1])


def _few_filters(subject: str, ranks: int, node: Node) -> Refusal:
    return Refusal(kind=RefusalKind.FILTERS, subject=subject, needed=ranks, limit=filters_of(node), layer=node.layer)


def unevenness(mesh: Mesh, shape: Sequence[int]) -> float:
    """The largest share of the input over an equal share."""
    dims = {"data": 0, **{name: dim - len(SPACE_AXES) for dim, name in enumerate(SPACE_AXES)}}
    ratio = 1.0
    for name, ranks in mesh.axes.items():
        if name in dims and -len(shape) <= dims[name] < len(shape):
            extent = shape[dims[name]]
            ratio *= math.ceil(extent / ranks) * ranks / extent
    return ratio
