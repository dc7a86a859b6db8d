"""The transfer table of a machine: measured times of what its ranks send, and what transfers do to computations."""

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
"""Measured group shapes that an unmeasured one is taken from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What a transfer and a computation beside it do to each other, while `active` ranks of a host do the same."""

    active: int
    compute_slowdown: float
    """How many times as long a computation takes while a transfer is under way."""
    transfer_slowdown: float
    """How many times as long a transfer takes while its ranks compute."""
    hidden: float
    """Of the shorter of the two, the fraction that takes no extra time: 1 on separate hardware, 0 on one busy core."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of a transfer as the table has them, and how far from measurements that is."""

    seconds: float
    spread: float
    measured: bool
    """Whether this very size and group was timed."""


@dataclass(frozen=True, kw_only=True)
class TransferTable:
    """`table.seconds("all_reduce", ranks=4, active=8, bytes_sent=1 << 20)`: by curves measured on one host."""

    backend: str
    """The library that moved the messages: gloo or nccl."""
    cores: int
    """That the host's ranks share. On devices of their own, as many as there are ranks."""
    curves: tuple[TransferCurve, ...]
    overlaps: tuple[Overlap, ...] = ()
    date: str = ""

    @cached_property
    def _by_carrier(self) -> Mapping[str, tuple[TransferCurve, ...]]:
        names = dict.fromkeys(curve.carrier for curve in self.curves)
        return {name: tuple(curve for curve in self.curves if curve.carrier == name) for name in names}

    def turns(self, active: int) -> float:
        """How many times as long ranks take because they share cores."""
        return max(1.0, active / self.cores)

    def seconds(self, carrier: str, *, ranks: int, active: int, bytes_sent: float) -> Timed | None:
        """Of one transfer in each of active / ranks groups at once; None for a carrier that was not measured."""
        curves = self._by_carrier.get(carrier, ())
        for curve in curves:
            if (curve.ranks, curve.active) == (ranks, active):
                return Timed(curve.at(bytes_sent), curve.spread, curve.has(bytes_sent))
        if not curves:
            return None
        near = sorted(curves, key=lambda curve: _distance(curve, ranks, active))[:NEAREST]
        weights = [_distance(curve, ranks, active) ** -2 for curve in near]
        found = [curve.rescaled(bytes_sent, ranks, self.turns(active) / self.turns(curve.active)) for curve in near]
        mean = sum(w * math.log(s) for w, s in zip(weights, found, strict=True)) / sum(weights)
        return Timed(math.exp(mean), 0.3 + max(curve.spread for curve in near), False)

    def overlap(self, active: int) -> Overlap | None:
        """As measured with that many ranks on a host, or with the nearest number of them; None if never measured."""
        return min(self.overlaps, key=lambda o: abs(math.log(o.active / active)), default=None)

    def save(self, path: str | Path) -> Path:
        """Write the table as JSON."""
        where = Path(path)
        where.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return where

    @classmethod
    def load(cls, path: str | Path) -> TransferTable:
        """Read what `save` wrote; a file that is none of those is refused."""
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
