"""A network as frozen values: its calls in order, their shapes and their weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from convmesh.errors import UnknownNameError
from convmesh.graph.kinds import WINDOW_OPTIONS, WITHOUT_SPLIT

Shape = tuple[int, ...]

RECURRENT = {"LSTM": 4, "GRU": 3, "RNN": 1, "LSTMCell": 4, "GRUCell": 3, "RNNCell": 1}
"""Torch's recurrent layers and their numbers of gates."""


@dataclass(frozen=True)
class Value:
    """One tensor of the global batch."""

    shape: Shape
    dtype: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer, named as in the model."""

    name: str
    shape: Shape
    dtype: str
    learns: bool
    is_buffer: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Node:
    """One call: of a module, a function or a method; or an input, an output, an attribute."""

    name: str
    kind: str
    layer: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[Value, ...]
    weights: tuple[Weight, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def takes_split(self) -> bool:
        """Whether a plan can say how this node's work is cut."""
        return bool(self.outputs) and self.kind not in WITHOUT_SPLIT

    @property
    def channels_last(self) -> bool:
        """Whether its channels are the last dim: the features of dense layers and embeddings."""
        return self.kind == "linear" or self.op == "Embedding"

    @property
    def is_recurrent(self) -> bool:
        """Whether it is one of torch's recurrent layers, with its own weights."""
        return self.kind == "recurrent" and self.op in RECURRENT and not self.is_computed

    @property
    def is_computed(self) -> bool:
        """Whether its weight is computed from others, as weight_norm and spectral_norm do."""
        return "parametrized" in self.options

    @property
    def is_cell(self) -> bool:
        """Whether it makes one time step: its input has samples and features only."""
        return self.is_recurrent and self.op.endswith("Cell")

    @property
    def sample_dim(self) -> int:
        """The sample dim of its input: the second if it is a recurrent layer that takes time first."""
        time_first = self.is_recurrent and not self.is_cell
        return int(time_first and "batch_first=True" not in str(self.options.get("settings", "")))

    @property
    def hidden_units(self) -> int:
        """Of a recurrent layer."""
        recalled = next(weight for weight in self.weights if "weight_hh" in weight.name)
        return recalled.shape[0] // RECURRENT[self.op]


@dataclass(frozen=True)
class Row:
    """One line of the table of layer sizes."""

    layer: str
    op: str
    input: Shape
    output: Shape
    weights: int
    activations: int


@dataclass(frozen=True)
class Graph:
    """Nodes in the order they run, and all weights of the model, used or not."""

    nodes: tuple[Node, ...]
    weights: tuple[Weight, ...]
    derived: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What later steps derive from the nodes and cache."""

    def node(self, name: str) -> Node:
        """The node called `name`."""
        if name not in self._by_name:
            raise UnknownNameError.of("node", name, self._by_name)
        return self._by_name[name]

    def layer(self, name: str) -> tuple[Node, ...]:
        """The nodes of a layer: one for each call of its module."""
        if name not in self._by_layer:
            raise UnknownNameError.of("layer", name, self._by_layer)
        return self._by_layer[name]

    def consumers(self, name: str) -> tuple[Node, ...]:
        """The nodes that take the output of the node called `name`, in order."""
        return self._consumers[self.node(name).name]

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The names of layers that can take a split, in the order in which they first run."""
        return tuple(self._by_layer)

    @cached_property
    def inputs(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.kind == "input")

    @cached_property
    def outputs(self) -> tuple[Value, ...]:
        """The tensors that the model returns."""
        return self.nodes[-1].outputs if self.nodes else ()

    @cached_property
    def opaque(self) -> dict[str, str]:
        """Layers that stay closed, or whose operator is unknown, with the reason."""
        return {node.layer: str(node.options.get("reason", "")) for node in self.nodes if node.kind == "opaque"}

    @cached_property
    def parameters(self) -> int:
        """Elements of all parameters; buffers do not count."""
        return sum(weight.elements for weight in self.weights if not weight.is_buffer)

    @cached_property
    def signature(self) -> str:
        """A hash of topology, kinds, windows and weight shapes: the same network for every sample."""
        place = {node.name: index for index, node in enumerate(self.nodes)}
        described = [
            (
                *(node.kind, node.op, tuple(place[name] for name in node.inputs)),
                tuple((weight.name, weight.shape) for weight in node.weights),
                tuple((key, str(node.options[key])) for key in WINDOW_OPTIONS if key in node.options),
            )
            for node in self.nodes
            if node.kind != "size"  # shape arithmetic follows from the rest
        ]
        return hashlib.sha256(repr(described).encode()).hexdigest()[:16]

    def table(self) -> list[Row]:
        """Sizes of every layer, in elements of the global batch."""
        return [self._row(node) for node in self.nodes if node.takes_split]

    def _row(self, node: Node) -> Row:
        inputs = (value for name in node.inputs for value in self._activations(name))
        return Row(
            layer=node.layer,
            op=node.op,
            input=next((value.shape for value in inputs), ()),
            output=node.outputs[0].shape,
            weights=sum(weight.elements for weight in node.weights if not weight.is_buffer),
            activations=sum(value.elements for value in node.outputs),
        )

    def _activations(self, name: str) -> tuple[Value, ...]:
        node = self._by_name[name]
        return () if node.kind == "attribute" else node.outputs

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _by_layer(self) -> dict[str, tuple[Node, ...]]:
        by_layer: dict[str, list[Node]] = {}
        for node in self.nodes:
            if node.takes_split:
                by_layer.setdefault(node.layer, []).append(node)
        return {layer: tuple(nodes) for layer, nodes in by_layer.items()}

    @cached_property
    def _consumers(self) -> dict[str, tuple[Node, ...]]:
        users: dict[str, list[Node]] = {node.name: [] for node in self.nodes}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                users[name].append(node)
        return {name: tuple(nodes) for name, nodes in users.items()}
