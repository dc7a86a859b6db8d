"""A measured training run: what ran where, and how long a step took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from convmesh.layout.mesh import SPACE_AXES, Mesh, space_axes

Role = Literal["anchor", "test"]
PRECISIONS = ("fp32", "tf32", "amp", "fp16", "bf16")
PARTS = ("data", "spatial", *SPACE_AXES, "filter", "channel", "pipeline")
"""The parts of a run's strategy."""

MOST = 10**9
"""Most of anything that a file counts."""


def whole_number(text: str) -> int | None:
    """The number that was written, or None; Python refuses to read thousands of digits, and nobody has so many GPUs."""
    is_short = text.isdecimal() and len(text) <= len(str(MOST))
    return int(text) if is_short and int(text) <= MOST else None


class Series(NamedTuple):
    """Runs with the same device, network, number format and code, which share a calibration."""

    system: str
    model: str
    precision: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One row of a file of measured runs."""

    id: str
    role: Role
    system: str
    gpus: int
    model: str
    precision: str
    strategy: Mapping[str, int] = field(hash=False)
    """Ranks by part: {"data": 4, "spatial": 4}."""
    batch: int
    seconds_step: float
    seconds_compute: float | None = None
    """Computing time, if it was measured; only anchors use it."""
    gpus_per_node: int | None = None
    contaminated: bool = False
    source: str = ""

    @property
    def series(self) -> Series:
        return Series(self.system, self.model, self.precision, self.source)

    @property
    def kind(self) -> str:
        """The strategy's name: "data+spatial"; parts of one rank do not count."""
        split = [_name(part) for part in PARTS if self.strategy.get(part, 1) > 1]
        return "+".join(dict.fromkeys(split)) or "data"

    @property
    def tf32(self) -> bool:
        return self.precision == "tf32"

    @property
    def dtype(self) -> str:
        return {"amp": "float16", "fp16": "float16", "bf16": "bfloat16"}.get(self.precision, "float32")

    def mesh(self, spatial_dims: int) -> Mesh:
        """Its ranks as a mesh; `spatial` cuts the first dim of space, as in all codes with public runs."""
        first = space_axes(max(1, spatial_dims))[0]
        names = {"spatial": first, "pipeline": "pipe"}
        return Mesh(**{names.get(part, part): ranks for part, ranks in self.strategy.items()})


def _name(part: str) -> str:
    return "spatial" if part in SPACE_AXES else part
