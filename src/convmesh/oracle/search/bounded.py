"""The least cost under a bound on a second cost, such as time within a device's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convmesh.oracle.search.elimination import Choices, Factor, Variable, cost_of, minimise

ROUNDS = 24
"""Halvings of the multiplier's interval."""


@dataclass(frozen=True)
class PricedFactor:
    """A node's cost and use by choice; both tables have the same variables."""

    cost: Factor
    use: Factor

    def weighed(self, multiplier: float) -> Factor:
        return Factor(self.cost.variables, self.cost.table + multiplier * self.use.table)


@dataclass(frozen=True)
class Bounded:
    """Choices within the bound, their cost and use, and a lower bound on the cost of any."""

    choices: Choices
    cost: float
    use: float
    least: float


def minimise_within(
    priced: Sequence[PricedFactor], bound: float, start: Mapping[Variable, int] | None = None
) -> Bounded | None:
    """Low-cost choices that use at most `bound`, by a price on use (Lagrange multiplier); None if there are none.

    For each price, the choices are the best of all with that use, and give a lower bound on the cost within `bound`.
    """
    free = _at(priced, 0.0, bound, start)
    if free is None or free.use <= bound:
        return free
    low, high = 0.0, max(free.cost, 1e-30) / max(bound, 1.0)
    best: Bounded | None = None
    least = free.least
    for _ in range(ROUNDS):
        trial = _at(priced, high, bound, start)
        assert trial is not None  # allowed choices stay allowed at any price
        least = max(least, trial.least)
        if trial.use <= bound:
            best = trial
            break
        low, high = high, high * 8
    for _ in range(ROUNDS if best else 0):
        middle = (low + high) / 2
        trial = _at(priced, middle, bound, start)
        assert trial is not None
        least = max(least, trial.least)
        if trial.use <= bound:
            high = middle
            best = trial if best is None or trial.cost < best.cost else best
        else:
            low = middle
    return None if best is None else Bounded(best.choices, best.cost, best.use, least)


def _at(
    priced: Sequence[PricedFactor], multiplier: float, bound: float, start: Mapping[Variable, int] | None
) -> Bounded | None:
    weighed = [part.weighed(multiplier) for part in priced]
    choices = minimise(weighed, start)
    if choices is None:
        return None
    cost = cost_of(choices, (part.cost for part in priced))
    use = cost_of(choices, (part.use for part in priced))
    return Bounded(choices, cost, use, cost + multiplier * (use - bound))
