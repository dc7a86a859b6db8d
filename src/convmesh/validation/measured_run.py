"""A measured training run: what ran where, and how long a step took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from convmesh.layout.mesh import SPACE_AXES, Mesh, space_axes

Role = Literal["anchor", "test"]
PRECISIONS = ("fp32", "tf32", "amp", "fp16", "bf16")
PARTS = ("data", "spatial", *SPACE_AXES, "filter", "channel", "pipeline")
"""What a run's strategy may be made of."""


class Series(NamedTuple):
    """Runs that share a device, a network, a number format and a code: one calibration holds for all."""

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
    """Parts and how many ranks each has: {"data": 4, "spatial": 4}."""
    batch: int
    seconds_step: float
    seconds_compute: float | None = None
    """Of it, what the device computed, where that was measured too; only anchors' is looked at."""
    gpus_per_node: int | None = None
    contaminated: bool = False
    source: str = ""

    @property
    def series(self) -> Series:
        return Series(self.system, self.model, self.precision, self.source)

    @property
    def kind(self) -> str:
        """The strategy's name: "data+spatial"; a part of one rank splits nothing."""
        split = [_name(part) for part in PARTS if self.strategy.get(part, 1) > 1]
        return "+".join(dict.fromkeys(split)) or "data"

    @property
    def tf32(self) -> bool:
        return self.precision == "tf32"

    @property
    def dtype(self) -> str:
        return {"amp": "float16", "fp16": "float16", "bf16": "bfloat16"}.get(self.precision, "float32")

    def mesh(self, spatial_dims: int) -> Mesh:
        """Its ranks as a grid; `spatial` without a dim cuts the first one, as all codes that we have runs of do."""
        first = space_axes(max(1, spatial_dims))[0]
        names = {"spatial": first, "pipeline": "pipe"}
        return Mesh(**{names.get(part, part): ranks for part, ranks in self.strategy.items()})


def _name(part: str) -> str:
    return "spatial" if part in SPACE_AXES else part
