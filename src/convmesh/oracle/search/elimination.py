"""The cheapest choice for every variable of a sum of tables, by eliminating one variable after another.

On the series-parallel graphs of most networks every elimination touches at most three variables, so the result is exact
in time linear in the layers. On wider graphs some variables are held while the others are solved exactly, in turns.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Variable = Hashable
Table = NDArray[np.float64]
Choices = dict[Variable, int]

MOST_ENTRIES = 1 << 20
"""Entries of the largest table during elimination."""


@dataclass(frozen=True, eq=False)
class Factor:
    """A cost that depends on some variables: one axis of the table for each, in order; infinite where forbidden."""

    variables: tuple[Variable, ...]
    table: Table

    def at(self, choices: Mapping[Variable, int]) -> float:
        return float(self.table[tuple(choices[name] for name in self.variables)])

    def given(self, held: Mapping[Variable, int]) -> Factor:
        """The factor with some variables held."""
        if not any(name in held for name in self.variables):
            return self
        index = tuple(held.get(name, slice(None)) for name in self.variables)
        return Factor(tuple(name for name in self.variables if name not in held), self.table[index])


def cost_of(choices: Mapping[Variable, int], factors: Iterable[Factor]) -> float:
    """The sum of all tables at some choices."""
    return math.fsum(factor.at(choices) for factor in factors)


def minimise(
    factors: Sequence[Factor], start: Mapping[Variable, int] | None = None, most_entries: int = MOST_ENTRIES
) -> Choices | None:
    """The choices with the least sum; None if every choice is forbidden.

    Exact while no table exceeds `most_entries`; beyond that it improves on `start`, which must be allowed.
    """
    order = _order(_scopes(factors), most_entries)
    if order.held and start is not None:
        return _in_turns(factors, dict(start), most_entries)
    if order.held:
        raise ValueError("`start` is needed: the graph is too wide to be solved exactly")
    return _eliminate(factors, order.variables)


@dataclass(frozen=True, slots=True)
class _Order:
    variables: list[Variable]
    held: set[Variable]


Scope = tuple[tuple[Variable, int], ...]
"""A factor's variables, each with the number of its choices."""


def _scopes(factors: Sequence[Factor]) -> tuple[Scope, ...]:
    return tuple(tuple(zip(factor.variables, factor.table.shape, strict=True)) for factor in factors)


@lru_cache(maxsize=16)
def _order(scopes: tuple[Scope, ...], most_entries: int, avoid: frozenset[Variable] = frozenset()) -> _Order:
    """The order of elimination, smallest tables first; variables whose tables are too large are held.

    Variables in `avoid` are held only if no others can be. The costs do not matter here, so a search for a price on
    memory, which changes only costs, finds one order once.
    """
    sizes = dict(pair for scope in scopes for pair in scope)
    near: dict[Variable, set[Variable]] = {name: set() for name in sizes}
    for scope in scopes:
        names = [name for name, _ in scope]
        for name in names:
            near[name].update(other for other in names if other != name)
    order, held = [], set()

    def entries(name: Variable) -> int:
        return math.prod(sizes[other] for other in near[name]) * sizes[name]

    tables = {name: entries(name) for name in near}
    while near:
        name = min(near, key=tables.__getitem__)
        if tables[name] > most_entries:
            free = [v for v in near if v not in avoid] or list(near)
            name = max(free, key=lambda v: len(near[v]))
            held.add(name)
        else:
            order.append(name)
            for other in near[name]:
                near[other] |= near[name] - {other}
        around = near.pop(name)
        for other in around:
            near[other].discard(name)
        tables |= {other: entries(other) for other in around}
    return _Order(order, held)


def _eliminate(factors: Sequence[Factor], order: Sequence[Variable]) -> Choices | None:
    waiting, choosers = _Waiting(factors), []
    for name in order:
        joined = _joined(waiting.taken(name), name)
        rest = Factor(joined.variables[:-1], joined.table.min(axis=-1))
        choosers.append(Factor(rest.variables, joined.table.argmin(axis=-1)))
        waiting.add(rest)
    if not math.isfinite(math.fsum(float(f.table) for f in waiting.factors.values())):
        return None
    choices: Choices = {}
    for name, best_of in zip(reversed(order), reversed(choosers), strict=True):
        choices[name] = int(best_of.at(choices))
    return choices


class _Waiting:
    """Factors in order of arrival, indexed by their variables."""

    def __init__(self, factors: Iterable[Factor]) -> None:
        self.factors: dict[int, Factor] = {}
        self._with: dict[Variable, list[int]] = defaultdict(list)
        self._numbers = itertools.count()
        for factor in factors:
            self.add(factor)

    def add(self, factor: Factor) -> None:
        number = next(self._numbers)
        self.factors[number] = factor
        for name in factor.variables:
            self._with[name].append(number)

    def taken(self, name: Variable) -> list[Factor]:
        """Remove and return those with a variable."""
        return [self.factors.pop(number) for number in self._with.pop(name) if number in self.factors]


def _joined(factors: Sequence[Factor], last: Variable) -> Factor:
    """The sum of some tables, with the axis of one variable at the end."""
    names = list(dict.fromkeys(name for factor in factors for name in factor.variables if name != last))
    place_of = {name: place for place, name in enumerate([*names, last])}
    first, *others = [_spread(factor, place_of) for factor in factors]
    return Factor(tuple(place_of), sum(others, first))


def _spread(factor: Factor, place_of: Mapping[Variable, int]) -> Table:
    """A factor's table with an axis for each of some variables, in their places."""
    places, table = [place_of[name] for name in factor.variables], factor.table
    ordered = sorted(places)
    if places != ordered:
        table = table.transpose(sorted(range(len(places)), key=places.__getitem__))
    shape = [1] * len(place_of)
    for place, size in zip(ordered, table.shape, strict=True):
        shape[place] = size
    return table.reshape(shape)


def _in_turns(factors: Sequence[Factor], choices: Choices, most_entries: int) -> Choices:
    """Hold some variables and solve the others exactly, then hold others, until nothing improves."""
    least, rested = cost_of(choices, factors), frozenset[Variable]()
    for _ in range(8):
        order = _order(_scopes(factors), most_entries, rested)
        held = {name: choices[name] for name in order.held}
        solved = _eliminate([factor.given(held) for factor in factors], order.variables)
        assert solved is not None  # the previous choices are allowed
        choices = {**choices, **solved, **held}
        cost = cost_of(choices, factors)
        if cost >= least * (1 - 1e-9) and rested:
            break
        least, rested = cost, frozenset(order.held)
    return choices
