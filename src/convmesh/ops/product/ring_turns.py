"""The turns of a ring: which rank's keys and values every rank looks at, one after the other.

In turn t each rank has those of the rank t places further on. They come straight from their owner, not by way of the
ranks between: that sends as much, and what a causal mask hides from a rank need not be sent to it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from convmesh.layout import Demand, ExchangePlan, Layout, Partition, Span, plan_exchange
from convmesh.layout.demand import DimDemand
from convmesh.layout.layout import LAYOUTS_KEPT


class RingTurn(NamedTuple):
    """One turn of a rank: the exchange that brings its keys and values (none in the first turn), and their numbers."""

    exchange: ExchangePlan | None
    columns: Span


@lru_cache(maxsize=LAYOUTS_KEPT)
def turns(keys: Layout, rows: Partition, is_causal: bool, rank: int) -> tuple[RingTurn, ...]:
    """The turns of a rank, for keys and values whose last dim but one is cut as the queries' `rows` are."""
    dim = len(keys.cuts) - 2
    axes, partition = keys.cuts[dim]
    own = keys.mesh.part(axes, keys.mesh.coordinates(rank))
    made = [RingTurn(None, _seen(partition, rows, own, 0, is_causal))]
    for turn in range(1, partition.parts):
        spans = [_seen(partition, rows, part, turn, is_causal) for part in range(partition.parts)]
        dims = [*Demand.ownership(keys).dims]
        dims[dim] = DimDemand(axes, [(span,) if span.extent else () for span in spans])
        made.append(RingTurn(plan_exchange(keys, Demand(keys.mesh, dims), rank), spans[own]))
    return tuple(made)


def _seen(keys: Partition, rows: Partition, part: int, turn: int, is_causal: bool) -> Span:
    """The keys that the queries of a part look at in a turn: nothing if there are no queries, or none may see them."""
    columns, queries = keys.span((part + turn) % keys.parts), rows.span(part)
    is_hidden = not queries.extent or (is_causal and columns.start >= queries.stop)
    return Span(0, 0) if is_hidden else columns
