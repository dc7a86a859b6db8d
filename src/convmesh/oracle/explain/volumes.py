"""Bytes that a rank sends for one layer, by formula: Dryden et al. (IPDPS and SC 2019), ring-optimal volumes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from convmesh.layout import Mesh, Span
from convmesh.layout.partition import Partition
from convmesh.oracle.explain.strategy_terms import LayerShares
from convmesh.oracle.explain.typed_layer import LayerSpec

BYTES = 4
"""Bytes of one element: float32."""

PHASES = ("forward", "backward-data", "backward-filter", "reduction")


@dataclass(frozen=True, slots=True)
class Volume:
    """A transfer in one phase of a step: its formula, and the bytes that one rank sends."""

    phase: str
    what: str
    formula: str
    bytes_sent: int


def volumes(layer: LayerSpec, shared: LayerShares, rank: int) -> list[Volume]:
    """Everything that a rank sends for the layer in one step; phases without traffic are omitted."""
    listed = [*_halos(layer, shared, rank), *_channels(layer, shared, rank), *_stages(layer, shared, rank)]
    listed.append(_reduction(layer, shared, rank))
    return [volume for volume in listed if volume.bytes_sent]


def of_phase(listed: list[Volume], phase: str) -> int:
    """Bytes sent in a phase."""
    return sum(volume.bytes_sent for volume in listed if volume.phase == phase)


def _halos(layer: LayerSpec, shared: LayerShares, rank: int) -> list[Volume]:
    if not shared.space:
        return []
    dims = [_Rows.of(layer, shared, dim, rank) for dim in range(len(layer.space))]
    own = math.prod(rows.own_needed for rows in dims)
    sent = math.prod(rows.needed_by_all for rows in dims) - own
    received = math.prod(rows.needed for rows in dims) - own
    each = _samples(layer, shared, rank) * layer.channels * BYTES
    widths = "·".join(f"({letter} + halo)" if dim in shared.space else letter for dim, letter in _letters(layer))
    inner = "·".join(letter for _, letter in _letters(layer))
    formula = f"n·C·({widths} − {inner})"
    return [
        Volume("forward", "rows of x that neighbours' windows reach", formula, each * sent),
        Volume("backward-data", "gradients of those rows, back to their owners", formula, each * received),
    ]


def _letters(layer: LayerSpec) -> list[tuple[int, str]]:
    return list(enumerate("dhw"[3 - len(layer.space) :]))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows along one dim: those a rank needs, its own among them, and its own once for each rank that needs them."""

    needed: int
    own_needed: int
    needed_by_all: int

    @classmethod
    def of(cls, layer: LayerSpec, shared: LayerShares, dim: int, rank: int) -> _Rows:
        axis = shared.space.get(dim)
        parts = 1 if axis is None else shared.mesh.axes[axis]
        place = 0 if axis is None else shared.mesh.coordinates(rank)[axis]
        extent = layer.space[dim]
        own = Partition.even(extent, parts).span(place)
        made = Partition.even(layer.made[2 + dim], parts)
        needs = [_window(layer, dim, made.span(part)) for part in range(parts)]
        by_all = sum(need.intersect(own).extent for need in needs)
        return cls(needs[place].extent, needs[place].intersect(own).extent, by_all)


def _window(layer: LayerSpec, dim: int, rows: Span) -> Span:
    """The input rows that output rows read, without padding."""
    if not rows.extent:
        return Span(0, 0)
    start = rows.start * layer.stride[dim] - layer.padding[dim]
    stop = (rows.stop - 1) * layer.stride[dim] - layer.padding[dim] + layer.kernel[dim]
    return Span(start, stop).intersect(Span(0, layer.space[dim]))


def _channels(layer: LayerSpec, shared: LayerShares, rank: int) -> list[Volume]:
    """The pattern shared by stationary-x, -y and -w, and by dense layers that gather samples."""
    g, k = shared.ranks(shared.gathered), shared.ranks(shared.kept)
    x, y = _held(layer, shared, rank)
    if layer.channels < g * k and not shared.by_samples:
        what = f"dx: partial sums of all of it to the other ranks; with {layer.channels} channels x is whole on all {g}"
        return [Volume("backward-data", what, "(G−1)·|x|", (g - 1) * x.all * BYTES)]
    of_x = "(G−1)/G·|x|" + "/K" * bool(shared.kept)
    of_y = "(K−1)/K·|y|" + "/G" * bool(shared.gathered)
    what = "samples" if shared.by_samples else "channels"
    return [
        Volume("forward", f"x: its {what} gathered over G = {g} ranks", of_x, (g - 1) * x.own * BYTES),
        Volume("forward", f"y: partial sums to their owners among K = {k}", of_y, (y.all - y.own) * BYTES),
        Volume("backward-data", f"dx: partial sums to their owners among G = {g}", of_x, (x.all - x.own) * BYTES),
        Volume("backward-filter", f"dy: gathered over K = {k} ranks", of_y, (k - 1) * y.own * BYTES),
    ]


@dataclass(frozen=True, slots=True)
class _Held:
    """Elements of a tensor: those a rank owns, and those of its whole group."""

    own: int
    all: int


def _held(layer: LayerSpec, shared: LayerShares, rank: int) -> tuple[_Held, _Held]:
    """Elements of x over the gathered axes, and of y over the kept axes."""
    samples, kept, gathered = _samples(layer, shared, rank), shared.kept, shared.gathered
    each_y = samples * math.prod(layer.made[2:])
    own_y, all_y = (_part(layer.filters, axes, shared.mesh, rank) for axes in (gathered + kept, gathered))
    y = _Held(own_y * each_y, all_y * each_y)
    each_x = math.prod(layer.space)
    if shared.by_samples:
        place = shared.mesh.coordinates(rank)["data"]
        mine = Partition.even(layer.samples, shared.ranks(gathered)).span(place).extent
        return _Held(mine * layer.channels * each_x, layer.samples * layer.channels * each_x), y
    own_x, all_x = (_part(layer.channels, axes, shared.mesh, rank) for axes in (kept + gathered, kept))
    return _Held(own_x * samples * each_x, all_x * samples * each_x), y


def _part(extent: int, axes: tuple[str, ...], mesh: Mesh, rank: int) -> int:
    """Channels or filters of a rank, cut axis by axis as weights are."""
    place = mesh.part(axes, mesh.coordinates(rank))
    return Partition.nested(extent, [mesh.axes[name] for name in axes]).span(place).extent


def _samples(layer: LayerSpec, shared: LayerShares, rank: int) -> int:
    if not shared.sample:
        return layer.samples
    place = shared.mesh.coordinates(rank)["data"]
    return Partition.even(layer.samples, shared.ranks(shared.sample)).span(place).extent


def _stages(layer: LayerSpec, shared: LayerShares, rank: int) -> list[Volume]:
    """Between equal stages, y goes forward and its gradient back, one micro-batch at a time."""
    if shared.stages == 1:
        return []
    stage = shared.mesh.coordinates(rank)["pipe"]
    y = _samples(layer, shared, rank) * math.prod(layer.made[1:]) * BYTES
    return [
        Volume("forward", "y to the next stage, a micro-batch at a time", "|y|", y * (stage < shared.stages - 1)),
        Volume("backward-data", "its gradient to the stage before", "|y|", y * (stage > 0)),
    ]


def _reduction(layer: LayerSpec, shared: LayerShares, rank: int) -> Volume:
    """A ring all-reduce sends every block but one twice; each weight carries a count."""
    ranks, mesh = shared.ranks(shared.summed), shared.mesh
    filters = _part(layer.filters, shared.gathered, mesh, rank)
    channels = _part(layer.channels, shared.kept, mesh, rank)
    elements = filters * channels * math.prod(layer.kernel) + 1
    cut = {"": "", "x": "/K", "y": "/G", "w": "/(K·G)"}[shared.algorithm]
    what = f"dw and a count: summed over the R = {ranks} ranks that share samples or space"
    return Volume("reduction", what, f"2·(R−1)/R·(|w|{cut} + 1)", 2 * (ranks - 1) * elements * BYTES // ranks)
