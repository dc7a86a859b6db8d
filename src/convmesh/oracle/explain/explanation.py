"""An explanation as a value, as text and as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from convmesh.layout import Mesh
from convmesh.oracle.explain.bubbles import diagram
from convmesh.oracle.explain.pictures import LETTERS, Tensor, side_by_side
from convmesh.oracle.explain.strategy_terms import LayerShares
from convmesh.oracle.explain.typed_layer import LayerSpec
from convmesh.oracle.explain.volumes import BYTES, Volume, of_phase
from convmesh.oracle.prediction import Prediction
from convmesh.plans.program_table import amount
from convmesh.system.units import shown

ABOUT = {
    "data": "every rank has all weights and some samples; weight gradients are summed",
    "spatial": "every rank has all weights and a part of space; windows reach over the cuts, so halos are exchanged",
    "filter": "weights are cut by filters (output channels); every rank computes some channels of y",
    "channel": "weights are cut by input channels; every rank computes a partial sum of all of y",
    "pipeline": "every rank has some layers; micro-batches pass through them one after another",
    "hybrid": "convolutions share samples; dense layers, which have most weights, are cut by filters over them",
}

STATIONARY = {
    "x": "stationary-x: x stays where it is; sums of y, and later dy, travel",
    "y": "stationary-y: y stays where it is; x, and later sums of dx, travel",
    "w": "stationary-w: filters and channels are cut over a grid of ranks; both x and y travel, each over fewer ranks",
}


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What one strategy does to one layer on one mesh: by formula, and by the recorded program."""

    strategy: str
    layer: LayerSpec
    shared: LayerShares
    rank: int
    """The rank whose numbers are shown: an inner one where space is cut."""
    tensors: tuple[Tensor, ...]
    volumes: tuple[Volume, ...]
    sent: Mapping[str, int]
    """Bytes by phase, from the program: forward, backward, reduction."""
    bytes_weights: int
    bytes_memory: int
    limit: tuple[int | None, str]
    microbatches: int = 1
    alternatives: Mapping[str, int] = field(default_factory=dict)
    """Bytes that a rank sends in a step, by algorithm for channels."""
    prediction: Prediction | None = None

    @property
    def mesh(self) -> Mesh:
        return self.shared.mesh

    @property
    def by_formula(self) -> dict[str, int]:
        """Bytes by phase of the program, whose backward covers data and filters."""
        listed = list(self.volumes)
        backward = of_phase(listed, "backward-data") + of_phase(listed, "backward-filter")
        return {
            "forward": of_phase(listed, "forward"),
            "backward": backward,
            "reduction": of_phase(listed, "reduction"),
        }

    @property
    def agrees(self) -> bool:
        """Whether formula and program agree."""
        return self.by_formula == dict(self.sent)

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "strategy": self.strategy,
            "layer": str(self.layer),
            "mesh": dict(self.mesh.axes),
            "algorithm": self.shared.algorithm or None,
            "phases": [
                {"phase": v.phase, "what": v.what, "formula": v.formula, "bytes_sent": v.bytes_sent}
                for v in self.volumes
            ],
            "bytes_sent": dict(self.sent),
            "bytes_formula": self.by_formula,
            "agrees": self.agrees,
            "bytes_weights": self.bytes_weights,
            "bytes_memory": self.bytes_memory,
            "limit": {"ranks": self.limit[0], "because": self.limit[1]},
            "alternatives": dict(self.alternatives),
            "prediction": self._predicted(),
        }

    def _predicted(self) -> dict[str, Any] | None:
        if self.prediction is None:
            return None
        seconds = self.prediction.seconds
        return {
            "system": self.prediction.system.name,
            "seconds_step": seconds.value,
            "seconds_low": seconds.low,
            "seconds_high": seconds.high,
            "basis": seconds.basis,
            "seconds_compute": self.prediction.parts.compute.value,
            "seconds_exposed": self.prediction.parts.exposed.value,
        }

    def __str__(self) -> str:
        parts = [self._title(), self._who_holds_what(), self._what_travels(), self._numbers()]
        return "\n\n".join("\n".join(lines) for lines in parts if lines)

    def _title(self) -> list[str]:
        about = [f"{part}: {ABOUT[part]}" for part in self.strategy.split("+")]
        sizes = ", ".join(f"{name} {amount(count * BYTES)}" for name, count in self.layer.elements.items())
        stays = [STATIONARY[self.shared.algorithm]] if self.shared.algorithm else []
        stages = [f"every further stage: {self.layer.following}"] if self.shared.stages > 1 else []
        return [*about, *stays, f"layer: {self.layer} in float32: {sizes}", *stages]

    def _who_holds_what(self) -> list[str]:
        if self.mesh.size > len(LETTERS):
            return [f"{self.mesh}: too many ranks to draw; --ranks {len(LETTERS)} or fewer are drawn."]
        names = ", ".join(LETTERS[: self.mesh.size])
        legend = "; small letters: rows that a neighbour's windows reach (halo)" if self._has_halo() else ""
        lines = [f"who holds what on {self.mesh} (ranks {names}{legend})", "", *side_by_side(self.tensors)]
        if self.shared.stages > 1:
            first = LETTERS[: self.mesh.size : self.mesh.size // self.shared.stages]  # stages are the outermost axis
            lines += ["", *diagram(self.shared.stages, self.microbatches, first)]
        return lines

    def _has_halo(self) -> bool:
        return any(any(tensor.halo) for tensor in self.tensors)

    def _what_travels(self) -> list[str]:
        rows = [("phase", "a rank sends", "formula", "what")]
        rows += [(v.phase, amount(v.bytes_sent), v.formula, v.what) for v in self.volumes]
        total = sum(self.sent.values())
        same = "as the formulas say" if self.agrees else f"the formulas say {amount(sum(self.by_formula.values()))}"
        rows.append(("total", amount(total), "", f"the runtime's own program sends {total:,} B: {same}"))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return ["  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows]

    def _numbers(self) -> list[str]:
        most, why = self.limit
        weights, peak = amount(self.bytes_weights), amount(self.bytes_memory)
        lines = [
            f"memory of a rank: {weights} of weights, {peak} at the peak of a step",
            f"most ranks: {most or 'the network decides'} ({why})",
        ]
        if self.alternatives:
            listed = ", ".join(f"stationary-{name} {amount(sent)}" for name, sent in self.alternatives.items())
            lines.append(f"in a step a rank sends: {listed}; a plan takes the least that its mesh's axes allow")
        return lines + self._time()

    def _time(self) -> list[str]:
        if self.prediction is None:
            return []
        step, parts = self.prediction.seconds, self.prediction.parts
        between = f"between {shown(step.low, 's')} and {shown(step.high, 's')}; {step.basis}"
        return [
            f"on {self.prediction.system.name}: {shown(step.value, 's')} a step ({between}): "
            f"{shown(parts.compute.value, 's')} computing, {shown(parts.exposed.value, 's')} waiting for transfers, "
            f"{shown(parts.update.value, 's')} updating weights"
        ]
