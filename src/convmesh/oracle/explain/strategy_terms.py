"""A strategy in the terms of its formulas: how many ranks share a layer's samples, space and channels."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import cast

from convmesh.errors import PlanError
from convmesh.layout.channels import Algorithm, split_for
from convmesh.layout.mesh import CHANNEL_AXES, Mesh, space_axes
from convmesh.oracle.explain.typed_layer import LayerSpec
from convmesh.plans.space_rows import LEAST_ROWS, rows_by_axis


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShares:
    """Axes by what they do to one layer."""

    mesh: Mesh
    sample: tuple[str, ...] = ()
    space: dict[int, str] = field(default_factory=dict)
    """The axis by spatial dim, counted from 0."""
    kept: tuple[str, ...] = ()
    """Axes that cut the weight's input channels: x stays, sums of y are sent."""
    gathered: tuple[str, ...] = ()
    """Axes that cut the weight's filters: x is gathered, y stays."""
    by_samples: bool = False
    """Whether samples are gathered, not channels: dense layers of the hybrid strategy."""
    stages: int = 1

    def ranks(self, axes: tuple[str, ...]) -> int:
        return self.mesh.extent(axes)

    @property
    def summed(self) -> tuple[str, ...]:
        """Axes along which the weight gradient is summed."""
        return (*self.sample, *(self.space[dim] for dim in sorted(self.space)))

    @property
    def algorithm(self) -> str:
        """x, y or w, whichever tensor stays in place; empty where channels are whole."""
        if self.kept and self.gathered:
            return "w"
        return "x" if self.kept else "y" * bool(self.gathered)


def sharing(strategy: str, layer: LayerSpec, mesh: Mesh, algorithm: str = "auto") -> LayerShares:
    """How a strategy divides one layer over ranks; refused with the limit if the layer is too small."""
    parts = strategy.split("+")
    dense = "hybrid" in parts and layer.kind == "linear" and "data" in mesh.axes
    kept, gathered = _channels(parts, mesh, algorithm)
    shares = LayerShares(
        mesh=mesh,
        sample=_present(("data",), mesh) if {"data", "hybrid"} & {*parts} and not dense else (),
        space=_space(layer, mesh) if "spatial" in parts else {},
        kept=kept,
        gathered=_present(("data",), mesh) if dense else gathered,
        by_samples=dense,
        stages=mesh.axes.get("pipe", 1),
    )
    _check(shares, layer, strategy)
    return shares


def limit(strategy: str, layer: LayerSpec, algorithm: str = "auto") -> tuple[int | None, str]:
    """The most ranks that a strategy can use in this layer, and why; None if the network's depth decides."""
    limits = [limit for part in strategy.split("+") for limit in _limits(part, layer, algorithm)]
    words = [what for _, what in limits]
    if "pipeline" in strategy.split("+"):
        return None, " × ".join([*words, "a stage for each layer"])
    return math.prod(number for number, _ in limits), " × ".join(words)


def _limits(part: str, layer: LayerSpec, algorithm: str) -> list[tuple[int, str]]:
    rows = [max(1, extent // LEAST_ROWS) for extent in rows_by_axis(layer.given, layer.made).values()]
    dense = part == "hybrid" and layer.kind == "linear"
    if part in ("filter", "channel") or dense:
        least = layer.filters if algorithm == "y" or dense else min(layer.filters, layer.channels)
        return [(least, f"{least} {'filters' if least == layer.filters else 'channels'}")]
    return {
        "data": [(layer.samples, f"{layer.samples} samples")],
        "hybrid": [(layer.samples, f"{layer.samples} samples")],
        "spatial": [(parts, f"{parts} parts") for parts in rows],
    }.get(part, [])


def _present(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    return tuple(name for name in axes if name in mesh.axes)


def _space(layer: LayerSpec, mesh: Mesh) -> dict[int, str]:
    return {dim: name for dim, name in enumerate(space_axes(len(layer.space))) if name in mesh.axes}


def _channels(parts: list[str], mesh: Mesh, algorithm: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    default: Algorithm = "x" if "channel" in parts else "y"
    chosen = default if algorithm == "auto" else cast(Algorithm, algorithm)
    split = split_for(chosen, _present(CHANNEL_AXES, mesh))
    return split.kept, split.gathered


def _check(shares: LayerShares, layer: LayerSpec, strategy: str) -> None:
    """Every rank must get a part of each cut dim."""
    needs = [(shares.sample, layer.samples, "samples"), (shares.kept, layer.channels, "channels")]
    needs += [(shares.gathered + shares.kept, layer.filters, "filters")]
    for axis in shares.space.values():
        least = rows_by_axis(layer.given, layer.made)[axis]
        needs.append(((axis,), least // LEAST_ROWS, f"parts of {LEAST_ROWS} rows along {axis}"))
    for axes, extent, what in needs:
        if shares.ranks(axes) > extent:
            raise PlanError(
                f"`ranks` (={shares.mesh.size}): {strategy} puts {shares.ranks(axes)} along {' and '.join(axes)}, but "
                f"{layer} has {extent} {what} to share; use fewer ranks or a larger layer."
            )
