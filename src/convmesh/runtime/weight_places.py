"""Where this rank's weights, buffers and optimiser states belong in the tensors of a single device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from convmesh.dist import OpenMesh
from convmesh.dist.cut_weights import block_layout, cuts_of, weight_blocks, weight_layout
from convmesh.gradients.local_gradients import local_of
from convmesh.gradients.root_update import BroadcastReducer
from convmesh.gradients.scattered import AXIS, ShardedReducer
from convmesh.layout import Box, Mesh, Span
from convmesh.layout.runs import boxes_of_run
from convmesh.private_torch.dtensors import is_dtensor
from convmesh.runtime.full_state import check_names, named_tensors
from convmesh.runtime.net import ParallelNet


@dataclass(frozen=True)
class WeightPlace:
    """Which values of a global tensor a rank holds, and which ranks hold the same ones."""

    name: str
    shape: tuple[int, ...]
    box: Box
    holders: tuple[int, ...]
    """Ranks whose copy counts, in order. This rank need not be among them."""
    run: Span | None = None
    """With a sharded optimiser: the values of the box that this rank updates, as a span in memory order."""
    order: tuple[int, ...] = ()
    """The dims in memory order, outermost first."""
    rows: tuple[Span, ...] = ()
    """Of a weight whose blocks are each cut: its rows here, one span per block; the box then counts them from 0."""

    def parts(self, values: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
        """Boxes of the global tensor, each with its part of `values`, which has the shape of the box or of the run."""
        parts = self._parts(values)
        return [part for box, held in parts for part in self._by_rows(box, held)] if self.rows else parts

    def _by_rows(self, box: Box, values: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """A box of the rows held here, as boxes of the global tensor."""
        first, here = 0, box.spans[0]
        for rows in self.rows:
            held = here.intersect(Span(first, first + rows.extent))
            if held.extent:
                place = Span(rows.start + held.start - first, rows.start + held.stop - first)
                yield Box((place, *box.spans[1:])), values.narrow(0, held.start - here.start, held.extent)
            first += rows.extent

    def _parts(self, values: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
        if self.run is None:
            return [(self.box, values)]
        stored = [self.box.shape[dim] for dim in self.order]
        pieces = boxes_of_run(stored, *self.run)
        runs = values.split([piece.size for piece in pieces])
        return [self._placed(piece, run) for piece, run in zip(pieces, runs, strict=True)]

    def _placed(self, piece: Box, run: torch.Tensor) -> tuple[Box, torch.Tensor]:
        """A box in the order of memory, and its values, with the dims in the order of the tensor."""
        places = [self.order.index(dim) for dim in range(len(self.order))]
        box = Box(tuple(piece.spans[place] for place in places)).inside(self.box)
        return box, run.view(piece.shape).permute(places)

    @property
    def held_shape(self) -> tuple[int, ...]:
        return self.box.shape if self.run is None else (self.run.extent,)


def weight_places(net: ParallelNet) -> tuple[list[tuple[WeightPlace, torch.Tensor]], dict[str, str]]:
    """This rank's part of every parameter and persistent buffer, each with its local values; shared ones once.

    Also the other names of shared ones, each with its first name.
    """
    first: dict[int, str] = {}
    places, shared = [], {}
    for name, tensor in named_tensors(net):
        known = first.setdefault(id(tensor), name)
        if known == name:
            places.append((_settled(_place(name, tensor, net), tensor, net), local_of(tensor).detach()))
        else:
            shared[name] = known
    return places, shared


def _settled(place: WeightPlace, tensor: torch.Tensor, net: ParallelNet) -> WeightPlace:
    """Where every replica has its own statistics, the first one's count."""
    is_own = net._running.replicas_differ and not isinstance(tensor, torch.nn.Parameter)
    return _of_first(place, net, (AXIS,)) if is_own else place


def update_places(net: ParallelNet) -> Iterator[tuple[torch.Tensor, WeightPlace]]:
    """What this rank's optimiser updates: its parameters, or its runs of them, with their places."""
    reducer = net._reducer
    for name, parameter in net.named_parameters():
        place = _place(name, parameter, net)
        if isinstance(reducer, BroadcastReducer):
            place = _of_first(place, net, reducer.axes_of.get(parameter, ()))
        for held, _ in reducer.held(parameter):
            yield held, place if held is parameter else _of_run(place, parameter, held, net)


def settle_weights(net: ParallelNet) -> None:
    """Give the net memory if it has none, and wait for updates under way."""
    net._give_memory()
    net._reducer.wait()


def check_fits(net: ParallelNet, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse tensors of another network; `shapes` has those of every stage."""
    stages = net._running.stages
    wanted = dict(named_tensors(net)) if stages is None else stages.wanted
    check_names({name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, wanted)


def _place(name: str, tensor: torch.Tensor, net: ParallelNet) -> WeightPlace:
    mesh, rank, shape = net.mesh.mesh, net.mesh.rank, tuple(tensor.shape)
    cuts = cuts_of(tensor) if is_dtensor(tensor) else {}
    cutting = frozenset(axis for axes in cuts.values() for axis in axes)
    holders = _holders(mesh, rank, cutting)
    if is_dtensor(tensor) and (blocks := weight_blocks(tensor)) > 1:
        _, rows, *others = block_layout(shape, mesh, cuts, blocks).box(rank).spans
        starts = [block * shape[0] // blocks + rows.start for block in range(blocks)]
        box = Box((Span(0, blocks * rows.extent), *others))
        return WeightPlace(name, shape, box, holders, rows=tuple(Span(s, s + rows.extent) for s in starts))
    box = weight_layout(shape, mesh, cuts).box(rank) if cuts else Box.whole(shape)
    return WeightPlace(name, shape, box, holders)


@lru_cache(maxsize=64)
def _holders(mesh: Mesh, rank: int, cutting: frozenset[str]) -> tuple[int, ...]:
    """The ranks that hold the same part of a tensor that some axes cut. A stage's weights are on its own ranks."""
    return tuple(sorted(mesh.group([axis for axis in mesh.axes if axis not in cutting and axis != "pipe"], rank)))


def _of_first(place: WeightPlace, net: ParallelNet, axes: tuple[str, ...]) -> WeightPlace:
    """The same place, where only the copy of the first rank along `axes` counts."""
    return replace(place, holders=tuple(rank for rank in place.holders if _is_first(net.mesh.mesh, rank, axes)))


def _is_first(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> bool:
    return not any(mesh.coordinates(rank).get(axis, 0) for axis in axes)


def _of_run(place: WeightPlace, parameter: torch.Tensor, held: torch.Tensor, net: ParallelNet) -> WeightPlace:
    reducer = net._reducer
    assert isinstance(reducer, ShardedReducer)
    here = _part(net.mesh, net.mesh.rank)
    holders = tuple(rank for rank in place.holders if _part(net.mesh, rank) == here)
    strides = local_of(parameter).stride()
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    return replace(place, holders=holders, run=reducer.span_of(held), order=tuple(order))


def _part(mesh: OpenMesh, rank: int) -> int:
    """Which part of a scattered bucket a rank has."""
    return sorted(mesh.mesh.group((AXIS,), rank), key=mesh.world_rank).index(rank)
