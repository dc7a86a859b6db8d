"""Exchange plans: who sends which indices to whom, forward and adjoint, seen from one rank.

A halo exchange, a change of layout and an all-gather are the same thing: ranks hold a region and need another. The rule
is stated once, in `route`: a receiver takes each index from the supplier at its own place on the axes along which
suppliers are replicas. Forward routes what is owned to what is needed. The adjoint routes gradients of what was needed
to the owners, who add them; replicas of one piece of work hold equal gradients, so each owner receives only one of
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from convmesh.layout.box import Region, Span, intersect_spans
from convmesh.layout.demand import Demand, DimDemand
from convmesh.layout.layout import Layout
from convmesh.layout.mesh import Mesh

Carrier = Literal["none", "neighbour", "all_to_all", "all_gather"]

Met = tuple[int, tuple[Span, ...]]
Places = tuple[int | None, ...]
"""A rank's place on some axes; None: anywhere."""

MOST_MET = 1024
"""Pairings of one dim to cache; each has an entry for every peer."""

MOST_NEIGHBOURS = 26
"""Up to the neighbours of a cube, single messages beat a collective over the whole group."""


@dataclass(frozen=True, slots=True)
class Message:
    """Indices that travel between this rank and `peer`, in global indices."""

    peer: int
    region: Region


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's part in one direction of an exchange; a message to itself is `kept`."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    kept: Region | None

    @property
    def elements_sent(self) -> int:
        return sum(message.region.size for message in self.sends)

    @property
    def elements_received(self) -> int:
        return sum(message.region.size for message in self.receives)


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """One rank's view of an exchange: what it holds, what it needs, and the messages of both directions."""

    held: Region
    needed: Region
    frame: Region
    """`needed` with the holes that operators skip over: what the fetched tensor has room for."""
    forward: Route
    adjoint: Route
    carrier: Carrier
    adjoint_carrier: Carrier
    group_axes: tuple[str, ...]

    @property
    def is_identity(self) -> bool:
        """Nothing moves and nothing changes shape on any rank of the mesh."""
        return self.carrier == "none" and self.adjoint_carrier == "none" and self.held == self.frame


def plan_exchange(source: Layout, needs: Demand, rank: int) -> ExchangePlan:
    """The plan that gives every rank what it needs of a tensor in layout `source`."""
    owned = Demand.ownership(source)
    axes = _moving_axes(owned, needs)
    if not axes and all(map(DimDemand.same_as, owned.dims, needs.dims)):
        return _in_place(owned.region(rank), needs.frame(rank))
    return ExchangePlan(
        held=owned.region(rank),
        needed=needs.region(rank),
        frame=needs.frame(rank),
        forward=route(owned, needs, rank),
        adjoint=route(needs, owned, rank),
        carrier=_carrier(owned, needs, axes),
        adjoint_carrier=_carrier(needs, owned, axes),
        group_axes=axes,
    )


def _in_place(held: Region, frame: Region) -> ExchangePlan:
    """The plan where every rank holds just what it needs, as in every other layer of a network."""
    stays = Route((), (), held if held.size else None)
    return ExchangePlan(held, held, frame, stays, stays, "none", "none", ())


def plan_conversion(source: Layout, target: Layout, rank: int) -> ExchangePlan:
    """The plan that turns one layout of a tensor into another."""
    return plan_exchange(source, Demand.ownership(target), rank)


def route(supply: Demand, demand: Demand, rank: int) -> Route:
    """The messages of `rank` when suppliers give receivers what they demand."""
    outgoing = list(_messages(supply, demand, rank, rank_supplies=True))
    incoming = list(_messages(supply, demand, rank, rank_supplies=False))
    kept = next((m.region for m in incoming if m.peer == rank), None)
    return Route(
        sends=tuple(m for m in outgoing if m.peer != rank),
        receives=tuple(m for m in incoming if m.peer != rank),
        kept=kept,
    )


def _messages(supply: Demand, demand: Demand, rank: int, rank_supplies: bool) -> Iterator[Message]:
    """All pairings of `rank` (as supplier or receiver) with a peer, by the supplier rule of this module."""
    mesh = supply.mesh
    here = mesh.coordinates(rank)
    mine, theirs = (supply, demand) if rank_supplies else (demand, supply)
    # Receivers must agree with their supplier where suppliers are replicas, and are all served elsewhere.
    fixed = {name: here[name] for name in mesh.axes if name not in supply.axes} if rank_supplies else {}
    free = [name for name in mesh.axes if name in supply.axes - theirs.axes] if rank_supplies else []
    met = [
        _met(mesh, dim, spans, *(tuple([at.get(name) for name in dim.axes]) for at in (here, fixed)))
        for dim, spans in zip(theirs.dims, mine.region(rank).dims, strict=True)
    ]
    replicas = [[(at - here[name]) * mesh.steps[name] for at in range(mesh.axes[name])] for name in free]
    to_replicas = [sum(shifts) for shifts in itertools.product(*replicas)]
    for choice in itertools.product(*met):
        peer = rank + sum([shift for shift, _ in choice])
        region = Region(tuple([spans for _, spans in choice]))
        for shift in to_replicas:
            yield Message(peer + shift, region)


@lru_cache(maxsize=MOST_MET)
def _met(mesh: Mesh, dim: DimDemand, spans: tuple[Span, ...], here: Places, fixed: Places) -> tuple[Met, ...]:
    """How far away the ranks are whose parts of `dim` share indices with `spans`, with those indices.

    `here` is the rank's place on the dim's axes, `fixed` where its peers must be. Layers with the same extent and
    kernel ask the same for their dims of space, whatever their channels.
    """
    own, must = (dict(zip(dim.axes, places, strict=True)) for places in (here, fixed))
    meetings = []
    for part in dim.near(spans):
        place = mesh.places(dim.axes, part)
        if all(must[name] in (None, at) for name, at in place.items()):
            common = intersect_spans(dim.part(part), spans)
            if common:
                meetings.append(
                    (sum([(at - (own[name] or 0)) * mesh.steps[name] for name, at in place.items()]), common)
                )
    return tuple(meetings)


def _moving_axes(owned: Demand, needs: Demand) -> tuple[str, ...]:
    """The axes along which messages can travel: all that cut a dim in which some rank lacks something."""
    moving: set[str] = set()
    for own, need in zip(owned.dims, needs.dims, strict=True):
        if not own.same_as(need):
            moving |= {*own.axes, *need.axes}
    return tuple(name for name in owned.mesh.axes if name in moving)


def _carrier(supply: Demand, demand: Demand, axes: tuple[str, ...]) -> Carrier:
    """How messages travel. Looks at the whole mesh, dim by dim, so that every rank decides the same."""
    fan_in = 1
    sends_any = False
    for given, asked in zip(supply.dims, demand.dims, strict=True):
        degree = given.degree(asked)
        fan_in *= degree
        sends_any |= degree > 1 or _displaced(given, asked)
    if not sends_any or fan_in == 0:
        return "none"
    group = supply.mesh.extent(axes)
    if fan_in == group and group > 2 and _is_gather(supply, demand, axes):
        return "all_gather"
    return "all_to_all" if fan_in > 1 + MOST_NEIGHBOURS else "neighbour"


def _displaced(given: DimDemand, asked: DimDemand) -> bool:
    """Whether some rank asks for what its own part may not give."""
    if not given.axes:
        return False
    return given.axes != asked.axes or not given.covers(asked)


def _is_gather(supply: Demand, demand: Demand, axes: tuple[str, ...]) -> bool:
    """Whether one dim's parts, equal in extent, go whole to all ranks of the group, and nothing else moves."""
    moved = [(g, a) for g, a in zip(supply.dims, demand.dims, strict=True) if not g.same_as(a)]
    if len(moved) != 1 or moved[0][0].axes != axes or moved[0][1].axes:
        return False
    given, asked = moved[0]
    starts, stops = given.hulls
    equal = given.extents.min() == given.extents.max()
    return bool(equal) and asked.part(0) == (Span(int(starts.min()), int(stops.max())),)
