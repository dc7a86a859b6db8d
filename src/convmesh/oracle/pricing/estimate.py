"""A predicted number with its bounds and its basis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Basis = Literal["measured", "interpolated", "model", "guess"]
BASES: tuple[Basis, ...] = get_args(Basis)
"""Timed on such a device; between timed shapes; computed from sourced figures; from guesses."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value in the unit of its name, with the interval in which it is expected."""

    value: float
    low: float
    high: float
    basis: Basis

    @classmethod
    def of(cls, value: float, basis: Basis, spread: float = 0.0) -> Estimate:
        """A value with a relative error of `spread`."""
        return cls(value, value * (1 - spread), value * (1 + spread), basis)

    @classmethod
    def exactly(cls, value: float) -> Estimate:
        return cls(value, value, value, "measured")

    def __float__(self) -> float:
        return self.value

    def scaled(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.basis)

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate.total((self, other))

    @classmethod
    def total(cls, parts: Iterable[Estimate]) -> Estimate:
        """The sum, with the basis of its largest share; errors add up, which errs on the safe side."""
        listed = list(parts)
        shares = dict.fromkeys(BASES, 0.0)
        for part in listed:
            shares[part.basis] += part.value
        basis = max(BASES, key=lambda name: shares[name]) if listed else "measured"
        return cls(sum([p.value for p in listed]), sum([p.low for p in listed]), sum([p.high for p in listed]), basis)
