"""A number with its origin, and the rules for numbers in a system file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from convmesh.system.units import EXAMPLES, shown

Origin = Literal["measured", "datasheet", "publication", "guess"]
ORIGINS: tuple[Origin, ...] = get_args(Origin)
"""From the most to the least trustworthy."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number in its base unit, with its origin, source and observed range."""

    value: float
    unit: str
    origin: Origin
    source: str
    date: str = ""
    spread: tuple[float, float] | None = None
    inherited: str = ""
    """The system that this figure was inherited from; an inherited figure is a guess, whatever it was there."""

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __str__(self) -> str:
        return shown(self.value, self.unit)

    @property
    def provenance(self) -> str:
        """The source, its date and the spread, on one line."""
        parts = [self.source, self.date]
        if self.spread is not None:
            parts.append(f"between {shown(self.spread[0], self.unit)} and {shown(self.spread[1], self.unit)}")
        return ", ".join(filter(None, parts))


@dataclass(frozen=True, slots=True)
class Rule:
    """Bounds of a figure in a file; it must be positive unless the bounds say otherwise."""

    unit: str = ""
    least: float = 0.0
    most: float = math.inf
    whole: bool = False
    zero: bool = False
    optional: bool = False
    keys: tuple[str, ...] = ()
    """If given, the field is a table of figures with some of these keys."""

    @property
    def example(self) -> str:
        """A valid value as written in a file."""
        return EXAMPLES[self.unit] if self.unit or self.least < 1 else f"{self.least:g}"

    def broken(self, value: float) -> str:
        """The rule that a value breaks, or an empty string."""
        if self.whole and value != int(value):
            return "must be a whole number"
        if not self.least <= value <= self.most or (value == 0 and not self.zero):
            return f"must be {self._range()}"
        return ""

    def _range(self) -> str:
        lower = f"at least {self.least:g}" if self.least or self.zero else "positive"
        return lower if math.isinf(self.most) else f"{lower} and at most {self.most:g}"


@dataclass(frozen=True, slots=True)
class Text:
    """A text field; one of `choices` if there are any; `default` where a file does not say."""

    choices: tuple[str, ...] = ()
    default: str | None = None


COUNT = Rule(least=1, whole=True)
"""A whole number of at least 1."""

FRACTION = Rule(most=1)
"""A fraction of a peak."""


def rules(kind: type) -> dict[str, Rule | Text]:
    """The rule of each field of a dataclass, from its annotation: `Annotated[Figure, Rule("B")]`, or plain `str`."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: next(iter(getattr(hint, "__metadata__", ())), Text()) for name, hint in hints.items()}
