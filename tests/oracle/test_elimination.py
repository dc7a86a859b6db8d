"""The cheapest choices by elimination, compared with trying every one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convmesh.oracle.search.bounded import PricedFactor, minimise_within
from convmesh.oracle.search.elimination import Choices, Factor, cost_of, minimise


def series_parallel(draw: st.DrawFn, nodes: int) -> list[tuple[int, int]]:
    """Edges of a graph built from one edge by splitting edges with nodes and doubling edges."""
    edges = [(0, 1)]
    for node in range(2, nodes):
        at = draw(st.integers(0, len(edges) - 1))
        first, last = edges[at]
        kept = [edges[at]] if draw(st.booleans()) else []
        edges[at : at + 1] = [*kept, (first, node), (node, last)]
    return edges


@st.composite
def problems(draw: st.DrawFn) -> list[PricedFactor]:
    """Tables over the nodes and edges of a graph, some entries forbidden."""
    nodes = draw(st.integers(2, 6))
    edges = series_parallel(draw, nodes)
    sizes = [draw(st.integers(1, 3)) for _ in range(nodes)]
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    forbidden = draw(st.sampled_from([0.0, 0.2]))
    found = []
    for names in [*((node,) for node in range(nodes)), *edges]:
        shape = [sizes[node] for node in names]
        cost = random.integers(0, 20, shape).astype(float)
        cost[random.random(shape) < forbidden] = math.inf
        found.append(PricedFactor(Factor(names, cost), Factor(names, random.integers(0, 10, shape).astype(float))))
    return found


def all_choices(priced: Sequence[PricedFactor]) -> Iterator[Choices]:
    sizes = {n: s for p in priced for n, s in zip(p.cost.variables, p.cost.table.shape, strict=True)}
    for values in itertools.product(*(range(size) for size in sizes.values())):
        yield dict(zip(sizes, values, strict=True))


@given(problems())
def test_elimination_finds_the_least_of_all(priced: list[PricedFactor]) -> None:
    factors = [part.cost for part in priced]
    least = min(cost_of(choices, factors) for choices in all_choices(priced))
    found = minimise(factors)
    assert (math.inf if found is None else cost_of(found, factors)) == least


@given(problems(), st.integers(0, 60))
def test_within_a_bound_nothing_beats_the_price_and_nothing_breaks_the_bound(
    priced: list[PricedFactor], bound: int
) -> None:
    within = [
        cost_of(choices, (p.cost for p in priced))
        for choices in all_choices(priced)
        if cost_of(choices, (p.use for p in priced)) <= bound
    ]
    found = minimise_within(priced, bound)
    if not any(map(math.isfinite, within)):
        assert found is None
        return
    if found is None:  # prices only find the corners of the feasible set
        return
    assert found.use <= bound
    assert found.least - 1e-6 <= min(within) <= found.cost


@given(problems())
def test_without_a_bound_that_binds_prices_change_nothing(priced: list[PricedFactor]) -> None:
    found = minimise_within(priced, 1e9)
    least = min(cost_of(choices, (p.cost for p in priced)) for choices in all_choices(priced))
    assert (math.inf if found is None else found.cost) == least


@given(problems())
def test_wide_graphs_get_no_worse_than_where_they_start(priced: list[PricedFactor]) -> None:
    factors = [part.cost for part in priced]
    start = next((c for c in all_choices(priced) if math.isfinite(cost_of(c, factors))), None)
    if start is None:
        return
    found = minimise(factors, start, most_entries=3)
    assert found is not None
    assert cost_of(found, factors) <= cost_of(start, factors)


def test_wide_graphs_need_a_start() -> None:
    with pytest.raises(ValueError, match="start"):
        minimise([Factor((0, 1), np.zeros((4, 4)))], most_entries=3)


def test_a_ring_of_two_hundred_layers_is_solved_exactly() -> None:
    """A chain with skips, as in residual networks, in which a uniform choice is best by construction."""
    layers, options = 200, 8
    moves = 1.0 - np.eye(options)
    own = np.full(options, 1.0)
    own[3] = 0.5
    factors = [Factor((n,), own) for n in range(layers)]
    factors += [Factor((n, n + 1), moves) for n in range(layers - 1)]
    factors += [Factor((n, n + 3), moves) for n in range(0, layers - 3, 3)]
    assert minimise(factors) == dict.fromkeys(range(layers), 3)
