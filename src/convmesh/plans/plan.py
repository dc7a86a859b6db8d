"""A plan: a mesh and a split for every layer."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from convmesh.errors import PlanError
from convmesh.graph import Graph, Node
from convmesh.layout.mesh import Mesh
from convmesh.plans.pipeline_rules import check_pipeline
from convmesh.plans.plan_text import dumps
from convmesh.plans.shared_weights import CUTS_CHANNELS, cut_kind, has_own_weights, is_table, sharers
from convmesh.plans.split import Split
from convmesh.plans.summing import Compression, Reduction, Summing

BatchNorm = Literal["global", "replica"]
Attention = Literal["gather", "ring"]
Precision = Literal["", "amp-bf16", "amp-fp16"]
"""The types of a step: those of the weights, or autocast, which keeps weights and their gradients as they are."""
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]

AUTOCAST: dict[str, str] = {"amp-bf16": "bfloat16", "amp-fp16": "float16"}
"""By precision: the type that autocast casts to."""

TAKES_SPLIT = ("conv", "conv_transpose", "linear", "pool", "resize", "batch_norm")
"""Kinds of nodes whose input is N×C×space by definition, or N×space×C; other nodes take the layout of their inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How layers are grouped into stages, by the first layer of each later stage, and how micro-batches run through."""

    starts: tuple[str, ...] = ()
    microbatches: int = 1
    schedule: Schedule = "1f1b"

    def __post_init__(self) -> None:
        if self.schedule not in get_args(Schedule):
            raise PlanError(f"`schedule` (={self.schedule!r}) must be one of {', '.join(get_args(Schedule))}.")
        if self.microbatches < 1:
            raise PlanError(f"`microbatches` (={self.microbatches}) must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Splits by layer name or pattern; exact names take precedence over patterns, later patterns over earlier ones."""

    mesh: Mesh
    splits: tuple[tuple[str, Split], ...]
    strategy: str = "custom"
    shapes: tuple[tuple[int, ...], ...] = ()
    """The global shapes of the network's inputs."""
    batchnorm: BatchNorm = "global"
    pipeline: Pipeline | None = None
    checkpoint: tuple[str, ...] = ()
    """Patterns of modules whose activations are recomputed in backward."""
    reduction: Reduction = "bucketed"
    """Where gradients are summed: on every rank, in the shards of an optimiser over `data`, on one root, or on every
    rank after a sum inside each host."""
    compression: Compression = "none"
    """How much of a gradient travels to be summed: all or, for slow links, less, which changes what is trained."""
    ranks_per_host: int = 1
    """Ranks on each host, in order, for a hierarchical reduction."""
    attention: Attention = "gather"
    """How ranks that have parts of the tokens look at all keys: gathered, or passed round, each rank's in its turn."""
    sub_batches: int = 1
    """Parts in which a batch is sent to dense layers that are cut over the batch's own axis."""
    precision: Precision = ""
    """The precision that its step is predicted for. What runs follows `torch.autocast` alone."""
    compile: bool = False
    """Whether its step is predicted as `parallelize(..., compile=True)` runs it; that argument alone says what runs."""
    signature: str = ""
    """The signature of the network that the plan was made for; an empty one fits any network with its layers."""
    notes: tuple[str, ...] = ()
    """Decisions, for the reader."""
    source: Any = field(default=None, compare=False, repr=False)
    """The captured network, where the plan was made from one."""

    def __post_init__(self) -> None:
        if self.batchnorm not in get_args(BatchNorm):
            raise PlanError(f"`batchnorm` (={self.batchnorm!r}) must be one of {', '.join(get_args(BatchNorm))}.")
        self._check_hosts()
        if self.attention not in get_args(Attention):
            raise PlanError(f"`attention` (={self.attention!r}) must be one of {', '.join(get_args(Attention))}.")
        check_precision(self.precision)
        if self.mesh.shares and self.pipeline is not None:
            raise PlanError(f"the plan's mesh is {self.mesh}; a pipeline's micro-batches have equal shares only.")
        for pattern, split in self.splits:
            for name in split.axes:
                if name not in self.mesh.axes:
                    raise PlanError(
                        f"layer {pattern!r} is cut by axis {name!r}, but the plan's mesh is {self.mesh}; "
                        f"add {name}= to the mesh or take the axis out of the layer."
                    )

    @property
    def summing(self) -> Summing:
        """How gradients are summed; refuses what does not go together."""
        return Summing(self.reduction, self.compression, self.ranks_per_host)

    def _check_hosts(self) -> None:
        if self.mesh.size % self.summing.ranks_per_host:
            raise PlanError(
                f"`ranks_per_host` (={self.ranks_per_host}) must divide the {self.mesh.size} ranks of {self.mesh}: "
                "a hierarchical reduction needs as many ranks on every host."
            )

    def split(self, layer: str) -> Split:
        """The split of a layer."""
        exact = self._exact.get(layer)
        if exact is not None:
            return exact
        return next((s for p, s in reversed(self._patterns) if fnmatch.fnmatchcase(layer, p)), Split())

    @cached_property
    def _exact(self) -> dict[str, Split]:
        return {name: split for name, split in self.splits if not _is_pattern(name)}

    @cached_property
    def _patterns(self) -> list[tuple[str, Split]]:
        return [(name, split) for name, split in self.splits if _is_pattern(name)]

    @property
    def idle_axes(self) -> tuple[str, ...]:
        """Axes along which ranks do the same work: they cut no layer and hold no stages."""
        used = {axis for _, split in self.splits for axis in split.axes} | {"pipe"}
        return tuple(axis for axis, size in self.mesh.axes.items() if size > 1 and axis not in used)

    def with_splits(self, splits: dict[str, Split]) -> Plan:
        """The plan with other splits for some layers."""
        changed = {**dict(self.splits), **splits}
        return replace(self, splits=tuple(changed.items()))

    def recomputes(self, module: str) -> bool:
        return any(fnmatch.fnmatchcase(module, pattern) for pattern in self.checkpoint)

    def recomputed(self, layer: str) -> str | None:
        """The outermost module around a layer that is recomputed."""
        if not self.checkpoint:
            return None
        names = layer.split(".")
        prefixes = (".".join(names[:count]) for count in range(1, len(names) + 1))
        return next((prefix for prefix in prefixes if self.recomputes(prefix)), None)

    def __str__(self) -> str:
        """The plan as it is saved: TOML, with decisions as comments."""
        return dumps(self)

    def save(self, path: str | Path) -> None:
        """Write the plan as TOML that a person can edit."""
        Path(path).write_text(str(self), encoding="utf-8")

    def check(self, graph: Graph) -> None:
        """Refuse a plan that does not fit this network: every name must match a layer, every layer a name."""
        layers = list(dict.fromkeys(node.layer for node in split_nodes(graph)))
        known, named = {"*", *layers}, {pattern for pattern, _ in self.splits}
        for pattern, _ in self.splits:
            if pattern not in known and not any(fnmatch.fnmatchcase(layer, pattern) for layer in layers):
                raise PlanError(f"the plan has layer {pattern!r}, but the network has none{_nearest(pattern, layers)}.")
        for layer in layers:
            if layer not in named and not any(fnmatch.fnmatchcase(layer, p) for p, _ in self._patterns):
                near = _nearest(layer, [pattern for pattern, _ in self.splits])
                raise PlanError(
                    f"the plan has no split for layer {layer!r} of the network{near}; "
                    f'name it ("{layer}" = {{}} leaves it whole), or add a default with "*".'
                )
        if self.signature and self.signature != graph.signature:
            raise PlanError(
                f"the plan was made for another network (signature {self.signature}; this one has {graph.signature}); "
                "make one with `cm.plan(model, sample, mesh)`, or take `signature` out of the file to use it anyway."
            )
        self._check_shared(graph)
        if self.pipeline is not None:
            check_pipeline(self, graph)

    def _check_shared(self, graph: Graph) -> None:
        """Refuse to cut a weight in one of its layers only, or one that is no parameter."""
        for node in split_nodes(graph):
            axes = self.split(node.layer).channel if cut_kind(node) in CUTS_CHANNELS else ()
            if axes and node.is_computed:
                raise PlanError(
                    f"layer {node.layer!r} is cut by {', '.join(axes)}, but its weight is computed from others "
                    "(weight_norm or another parametrization); leave its channels whole."
                )
            for other in sharers(graph, node) if axes else ():
                if cut_kind(other) not in CUTS_CHANNELS or self.split(other.layer).channel != axes:
                    raise PlanError(
                        f"layer {node.layer!r} is cut by {', '.join(axes)}, but {other.layer!r} has the same weight, "
                        "and is not; split both alike, or leave both whole."
                    )


def check_precision(name: str) -> None:
    """Refuse a name that is no precision."""
    if name not in get_args(Precision):
        allowed = ", ".join(repr(one) for one in get_args(Precision))
        raise PlanError(f"`precision` (={name!r}) must be one of {allowed}; '' is that of the weights.")


def split_nodes(graph: Graph) -> Iterator[Node]:
    """The nodes that a plan splits; all others take the layout of their inputs."""
    if "split nodes" not in graph.derived:
        graph.derived["split nodes"] = tuple(_split_nodes(graph))
    return iter(graph.derived["split nodes"])


def _split_nodes(graph: Graph) -> Iterator[Node]:
    shapes = {node.name: node.outputs[0].shape for node in graph.nodes if node.outputs}
    for node in graph.nodes:
        if is_table(node) and node.inputs:
            yield node
        elif node.is_recurrent and node.inputs:
            if len(shapes.get(node.inputs[0], ())) == (2 if node.is_cell else 3):
                yield node
        elif node.kind in TAKES_SPLIT and node.inputs:
            dims = len(shapes.get(node.inputs[0], ()))
            if _pads_channels(node, dims):
                continue
            if dims == 2 or (dims > 2 and (node.kind != "linear" or has_own_weights(graph, node))):
                yield node


def _pads_channels(node: Node, dims: int) -> bool:
    """Whether a call pads dim 1 too, if only by nothing: its tensor is not N×C×space, as in window attention."""
    arguments = node.options.get("arguments", ())
    padding = arguments[0] if isinstance(arguments, tuple) and arguments else ()
    return node.op == "pad" and isinstance(padding, tuple) and len(padding) > 2 * (dims - 2)


def _is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f"; the nearest is {near[0]!r}" if near else ""
