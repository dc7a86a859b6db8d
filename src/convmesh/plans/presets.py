"""Named strategies: the split of every layer of a network on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from convmesh.errors import PlanError
from convmesh.graph import Graph, Node
from convmesh.layout.mesh import SPACE_AXES, Mesh
from convmesh.plans.layer_extents import rows_of, samples_of, uneven_channels
from convmesh.plans.plan import split_nodes
from convmesh.plans.shared_weights import CUTS_CHANNELS, cut_kind, may_cut, shared_algorithm, sharers
from convmesh.plans.space_rows import LEAST_ROWS, rows_by_axis
from convmesh.plans.split import Axes, Split

AXES_OF: dict[str, Axes] = {
    "data": ("data",),
    "spatial": SPACE_AXES,
    "filter": ("filter",),
    "channel": ("channel",),
    "pipeline": ("pipe",),
    "hybrid": ("data",),
}
"""The mesh axes of each simple strategy."""

STRATEGIES = (
    "data", "spatial", "filter", "channel", "pipeline", "hybrid",
    "data+spatial", "data+filter", "data+channel", "data+pipeline",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetOptions:
    """Where a spatial strategy stops: where a rank would get fewer than `least_rows` rows, or at a named layer."""

    least_rows: int = LEAST_ROWS
    spatial_until: str | None = None


@dataclass
class Preset:
    """Splits by layer, and notes on the decisions."""

    splits: dict[str, Split] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Layer:
    """One layer with the shapes of its input and output."""

    node: Node
    given: tuple[int, ...]
    made: tuple[int, ...]

    @property
    def has_tokens(self) -> bool:
        """Whether it makes more than one vector a sample."""
        return self.node.channels_last and len(self.made) > 2


def preset(strategy: str, graph: Graph, mesh: Mesh, options: PresetOptions | None = None) -> Preset:
    """The splits of a strategy for a network on a mesh."""
    check_axes(strategy, mesh)
    chooser = _Chooser(strategy, graph, mesh, options or PresetOptions())
    result = Preset()
    for layer in _layers(graph):
        result.splits.setdefault(layer.node.layer, chooser.split(layer))
    result.notes += chooser.notes
    if not any(split.axes for split in result.splits.values()) and {*mesh.axes} - {"data", "pipe"}:
        result.notes.append(f"{strategy} cuts no layer of this network: ranks compute all that data= leaves whole")
    return result


def check_axes(strategy: str, mesh: Mesh) -> None:
    """Refuse a strategy that leaves an axis of the mesh without work."""
    if strategy not in STRATEGIES:
        raise PlanError(f"`strategy` (={strategy!r}) must be one of {', '.join(STRATEGIES)}, auto, or layer → split.")
    used = [name for part in strategy.split("+") for name in AXES_OF[part]]
    if idle := [name for name in mesh.axes if name not in used]:
        fitting = [s for s in STRATEGIES if {*mesh.axes} <= {n for part in s.split("+") for n in AXES_OF[part]}]
        advice = f"use {' or '.join(fitting)}" if fitting else "give a split for each layer instead"
        raise PlanError(f"`strategy` (={strategy!r}) leaves axis {idle[0]!r} of {mesh} without work; {advice}.")


def strategy_for(mesh: Mesh) -> str:
    """The simplest strategy that uses every axis of a mesh."""
    for strategy in STRATEGIES:
        if {*mesh.axes} <= {name for part in strategy.split("+") for name in AXES_OF[part]}:
            return strategy
    raise PlanError(f"no named strategy uses the axes of {mesh}; give a split for each layer.")


def _layers(graph: Graph) -> list[_Layer]:
    shapes = {node.name: node.outputs[0].shape for node in graph.nodes if node.outputs}
    return [_Layer(node, shapes[node.inputs[0]], node.outputs[0].shape) for node in split_nodes(graph)]


class _Chooser:
    """Decides layer by layer, and keeps notes for the reader."""

    def __init__(self, strategy: str, graph: Graph, mesh: Mesh, options: PresetOptions) -> None:
        self.graph = graph
        self.mesh = mesh
        self.options = options
        self.notes: list[str] = []
        self._parts = strategy.split("+")
        self._stopped = False
        self._told: set[str] = set()
        self._made: dict[tuple[tuple[str, Axes], ...], Split] = {}
        """Layers that are cut alike share one value: it is checked once, and quickly found equal."""

    def split(self, layer: _Layer) -> Split:
        """The split of one layer by all parts of the strategy."""
        chosen: dict[str, Axes] = {}
        if {"data", "hybrid"} & {*self._parts}:
            chosen["sample"] = self._present(("data",))
        for part, choose in self._choosers().items():
            if part in self._parts:
                choose(layer, chosen)
        key = tuple(chosen.items())
        if key not in self._made:
            self._made[key] = Split(**chosen)  # type: ignore[arg-type]
        split = self._made[key]
        algorithm = shared_algorithm(self.graph, layer.node) if split.channel else None
        return replace(split, algorithm=algorithm) if algorithm else split

    def _choosers(self) -> dict[str, Callable[[_Layer, dict[str, Axes]], None]]:
        return {
            "spatial": self._spatial,
            "filter": lambda layer, chosen: self._channel(layer, chosen, ("filter",)),
            "channel": lambda layer, chosen: self._channel(layer, chosen, ("channel",)),
            "hybrid": self._dense_by_filters,
        }

    def _present(self, axes: Axes) -> Axes:
        return tuple(name for name in axes if name in self.mesh.axes)

    def _spatial(self, layer: _Layer, chosen: dict[str, Axes]) -> None:
        """Cut space while every rank has enough rows; leftover axes cut samples, else channels, else nothing."""
        self._stopped |= layer.node.layer == self.options.spatial_until
        if layer.has_tokens:
            self._tokens(layer, chosen)
            return
        extents, free = rows_of(layer.node, layer.given), []
        for axis in self._present(SPACE_AXES):
            rows = extents.get(axis, 0) // self.mesh.axes[axis]
            if rows >= self.options.least_rows and not self._stopped:
                chosen[axis] = (axis,)
            else:
                free.append(axis)
                self._tell(layer, axis, extents.get(axis))
        if free:
            self._employ(layer, chosen, tuple(free))

    def _tokens(self, layer: _Layer, chosen: dict[str, Axes]) -> None:
        """Axes of space cut the token dims of their names, or else all cut the last; dims that arrive cut stay cut."""
        if self._stopped:
            return
        rows, axes = rows_by_axis(layer.given, layer.made, channels_last=True), self._present(SPACE_AXES)
        named = {name: (name,) for name in axes} if {*axes} <= {*rows} else {[*rows][-1]: axes}
        least = self.options.least_rows
        chosen.update({dim: by for dim, by in named.items() if by and rows[dim] >= least * self.mesh.extent(by)})

    def _employ(self, layer: _Layer, chosen: dict[str, Axes], free: Axes) -> None:
        """Give axes that no longer cut space other work."""
        samples = chosen.get("sample", ()) + free
        if samples_of(layer.node, layer.given) >= self.mesh.extent(samples):
            chosen["sample"] = samples
        elif self._fits_channels(layer, free):
            chosen["channel"] = free

    def _channel(self, layer: _Layer, chosen: dict[str, Axes], axes: Axes) -> None:
        present = self._present(axes)
        if present and self._fits_channels(layer, present):
            chosen["channel"] = present

    def _dense_by_filters(self, layer: _Layer, chosen: dict[str, Axes]) -> None:
        axes = self._present(("data",))
        if layer.node.kind == "linear" and not layer.has_tokens and axes and self._fits_channels(layer, axes):
            chosen.update(sample=(), channel=axes)

    def _fits_channels(self, layer: _Layer, axes: Axes) -> bool:
        """Whether the layer has a weight with enough filters, and groups that divide, for these axes."""
        if cut_kind(layer.node) not in CUTS_CHANNELS:
            return False
        if not may_cut(self.graph, layer.node):
            self._say(
                f"{layer.node.layer}: channels stay whole: {sharers(self.graph, layer.node)[0].layer} shares them"
            )
            return False
        rule = uneven_channels(layer.node, self.mesh.extent(axes))
        if layer.node.is_recurrent and len(axes) > 1:
            rule = "hidden units are cut by one axis"
        if not rule:
            return True
        self._say(f"{layer.node.layer}: channels stay whole: {rule}")
        return False

    def _tell(self, layer: _Layer, axis: str, extent: int | None) -> None:
        if axis in self._told:
            return
        self._told.add(axis)
        why = f"extent {extent} gives {self.mesh.axes[axis]} ranks fewer than {self.options.least_rows} rows each"
        if self._stopped:
            why = "`spatial_until` asks for it"
        elif extent is None:
            why = f"it has no {axis}"
        self._say(f"{axis} cuts space up to {layer.node.layer}, not further: {why}")

    def _say(self, note: str) -> None:
        self.notes.append(note)
