"""A predicted number: between which bounds it lies, and what it rests on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Basis = Literal["measured", "interpolated", "model", "guess"]
BASES: tuple[Basis, ...] = get_args(Basis)
"""Timed on such a device; between timed ones; computed from figures that somebody stands for; from guesses."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value in the unit that its name says, with the interval that it is expected in."""

    value: float
    low: float
    high: float
    basis: Basis

    @classmethod
    def of(cls, value: float, basis: Basis, spread: float = 0.0) -> Estimate:
        """A value that may be off by a fraction of itself."""
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
        """The sum; it rests on what most of it rests on. Errors are taken to go the same way, which is careful."""
        listed = list(parts)
        shares = dict.fromkeys(BASES, 0.0)
        for part in listed:
            shares[part.basis] += part.value
        basis = max(BASES, key=lambda name: shares[name]) if listed else "measured"
        return cls(sum(p.value for p in listed), sum(p.low for p in listed), sum(p.high for p in listed), basis)
