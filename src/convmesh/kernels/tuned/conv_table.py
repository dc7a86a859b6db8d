"""Which convolutions our kernels compute faster than torch's on a kind of GPU, and how: measured, kept in files."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from functools import cache
from importlib import resources
from math import prod
from typing import Literal

from convmesh.kernels.tuned.conv_configs import KernelConfig
from convmesh.kernels.tuned.conv_shape import ConvShape

_log = logging.getLogger(__name__)

FORMAT = 1
WORTH = 0.95
"""The most of torch's time that our kernel may take to be chosen, as measurements vary."""

Phase = Literal["forward", "input", "weight"]


@dataclass(frozen=True, slots=True)
class Measured:
    """One phase of a convolution, timed: our best configuration and torch's best memory format."""

    phase: str
    shape: ConvShape
    dtype: str
    config: KernelConfig
    seconds: float
    seconds_torch: float

    @property
    def outputs(self) -> int:
        return self.shape.samples * prod(self.shape.out)


@dataclass(frozen=True)
class ConvTable:
    """Measurements of one kind of GPU."""

    device: str
    rows: tuple[Measured, ...]

    def config_for(self, phase: Phase, shape: ConvShape, dtype: str) -> KernelConfig | None:
        """The configuration that beats torch for this shape; None if there is none."""
        row = self.row_for(phase, shape, dtype)
        return None if row is None else row.config

    def row_for(self, phase: Phase, shape: ConvShape, dtype: str) -> Measured | None:
        """The measurement nearest to a shape, if our kernel beat torch's in it.

        Kernels walk over outputs one row at a time, so a shape with the same channels and equally wide rows, but more
        or fewer of them, takes the same time per output if it still fills the GPU.
        """
        alike = [row for row in self.rows if row.phase == phase and row.dtype == dtype and _is_alike(row, shape)]
        if not alike:
            return None
        wanted = shape.samples * prod(shape.out)
        nearest = min(alike, key=lambda row: abs(row.outputs - wanted))
        return nearest if nearest.seconds <= WORTH * nearest.seconds_torch else None


LEAST_OUTPUTS = 1 << 18
"""Positions of an output that keep a GPU busy: below that, launches and the addition of parts matter."""


def _is_alike(row: Measured, shape: ConvShape) -> bool:
    if row.shape == shape:
        return True
    same = replace(row.shape, samples=shape.samples, extents=shape.extents) == shape
    enough = shape.samples * prod(shape.out) >= min(LEAST_OUTPUTS, row.outputs)
    return same and enough and shape.out[2] % row.config.width == 0


@cache
def shipped_table(device: str) -> ConvTable | None:
    """The table for a GPU of this name, e.g. `NVIDIA H200`; None, with a line in the log, if there is none."""
    name = device.lower().replace(" ", "-")
    file = resources.files("convmesh.kernels.tuned") / "tables" / f"{name}.json"
    if not file.is_file():
        _log.info("There is no table of tuned convolutions for %s: torch computes them", device)
        return None
    return parse_table(file.read_text(encoding="utf-8"), device)


def parse_table(text: str, device: str) -> ConvTable | None:
    """A table of this kind of GPU; None, with a line that says why, if the text is something else."""
    try:
        held = json.loads(text)
        for name, wanted in (("format", FORMAT), ("device", device)):
            if held.get(name) != wanted:
                raise ValueError(f"its {name} is {held.get(name)!r}, not {wanted!r}")
        return ConvTable(device, tuple(_row(**row) for row in held["rows"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _log.warning("The table of tuned convolutions for %s is ignored, torch computes them: %s", device, error)
        return None


def _row(phase: str, shape: str, dtype: str, config: list[int], seconds: float, seconds_torch: float) -> Measured:
    return Measured(phase, ConvShape.parse(shape), dtype, KernelConfig(*config), seconds, seconds_torch)


def write_table(table: ConvTable, origin: dict[str, str]) -> str:
    """A table as a file's text, one row per line; `origin` says where it was measured."""
    head = json.dumps({"format": FORMAT, "device": table.device, "origin": origin}, indent=1)
    rows = ",\n".join(map(_line, table.rows))
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def _line(row: Measured) -> str:
    values = {"phase": row.phase, "shape": str(row.shape), "dtype": row.dtype, "config": list(astuple(row.config))}
    times = {"seconds": round(row.seconds, 8), "seconds_torch": round(row.seconds_torch, 8)}
    return "  " + json.dumps(values | times)


def best_rows(rows: Iterable[Measured]) -> tuple[Measured, ...]:
    """The fastest row for each phase of each shape."""
    best: dict[tuple[str, ConvShape, str], Measured] = {}
    for row in rows:
        key = row.phase, row.shape, row.dtype
        if key not in best or row.seconds < best[key].seconds:
            best[key] = row
    return tuple(best.values())
