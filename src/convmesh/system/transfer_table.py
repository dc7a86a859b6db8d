"""The transfer table of a machine: measured times of transfers, and how they and computations slow each other down."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from convmesh.errors import SystemFileError
from convmesh.system.curves import TransferCurve

NEAREST = 4
"""Number of measured group shapes from which an unmeasured one is interpolated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How a transfer and a concurrent computation slow each other down while `active` ranks of a host do both."""

    active: int
    compute_slowdown: float
    """Factor on a computation's time while a transfer is under way."""
    transfer_slowdown: float
    """Factor on a transfer's time while its ranks compute."""
    hidden: float
    """Fraction of the shorter of the two that takes no extra time: 1 on separate hardware, 0 on one busy core."""


@dataclass(frozen=True, slots=True)
class Timed:
    """The time of a transfer according to the table, and its uncertainty."""

    seconds: float
    spread: float
    measured: bool
    """Whether exactly this size and group was timed."""


@dataclass(frozen=True, kw_only=True)
class TransferTable:
    """`table.seconds("all_reduce", ranks=4, active=8, bytes_sent=1 << 20)`, from curves measured on one host."""

    backend: str
    """The library that moved the messages: gloo or nccl."""
    cores: int
    """Cores that the host's ranks share; the number of ranks if each has its own device."""
    curves: tuple[TransferCurve, ...]
    overlaps: tuple[Overlap, ...] = ()
    date: str = ""

    @cached_property
    def _by_carrier(self) -> Mapping[str, tuple[TransferCurve, ...]]:
        names = dict.fromkeys(curve.carrier for curve in self.curves)
        return {name: tuple(curve for curve in self.curves if curve.carrier == name) for name in names}

    def turns(self, active: int) -> float:
        """Factor by which ranks slow down because they share cores."""
        return max(1.0, active / self.cores)

    def seconds(self, carrier: str, *, ranks: int, active: int, bytes_sent: float) -> Timed | None:
        """Time of one transfer in each of active / ranks groups at once; None if the carrier was not measured."""
        curves = self._by_carrier.get(carrier, ())
        for curve in curves:
            if (curve.ranks, curve.active) == (ranks, active):
                return Timed(curve.at(bytes_sent), curve.spread, curve.has(bytes_sent))
        if not curves:
            return None
        near = sorted(curves, key=lambda curve: _distance(curve, ranks, active))[:NEAREST]
        weights = [_distance(curve, ranks, active) ** -2 for curve in near]
        rescaled = [curve.rescaled(bytes_sent, ranks, self.turns(active) / self.turns(curve.active)) for curve in near]
        mean = sum(w * math.log(s) for w, s in zip(weights, rescaled, strict=True)) / sum(weights)
        return Timed(math.exp(mean), 0.3 + max(curve.spread for curve in near), False)

    def overlap(self, active: int) -> Overlap | None:
        """Overlap measured with the nearest number of active ranks; None if never measured."""
        return min(self.overlaps, key=lambda o: abs(math.log(o.active / active)), default=None)

    def save(self, path: str | Path) -> Path:
        """Write the table as JSON."""
        target = Path(path)
        target.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return target

    @classmethod
    def load(cls, path: str | Path) -> TransferTable:
        """Read a table written by `save`; refuse any other file."""
        try:
            return _read(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError) as error:
            raise SystemFileError(f"`path` (={str(path)!r}) must be a transfer table as JSON: {error}.") from None


def _distance(curve: TransferCurve, ranks: int, active: int) -> float:
    return math.hypot(math.log2(curve.ranks / ranks), math.log2(curve.active / active))


def _read(stored: Mapping[str, Any]) -> TransferTable:
    curves = tuple(
        TransferCurve(**{**c, "bytes_sent": tuple(c["bytes_sent"]), "seconds": tuple(c["seconds"])})
        for c in stored["curves"]
    )
    for curve in curves:
        _check(curve)
    overlaps = tuple(Overlap(**overlap) for overlap in stored.get("overlaps", ()))
    return TransferTable(**{**stored, "curves": curves, "overlaps": overlaps})


def _check(curve: TransferCurve) -> None:
    sizes, seconds = curve.bytes_sent, curve.seconds
    if not sizes or len(sizes) != len(seconds) or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"{curve.carrier} over {curve.ranks} ranks needs ascending bytes_sent, and seconds for each")
    if not (min(sizes) > 0 and min(seconds) > 0 and curve.ranks > 1 and curve.active > 0):
        raise ValueError(f"{curve.carrier} over {curve.ranks} ranks must have positive bytes, seconds and ranks")
