"""Describing a traced graph as frozen values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from convmesh.errors import CaptureError
from convmesh.graph.graph import Graph, Node, Value, Weight
from convmesh.graph.kinds import kind_of
from convmesh.graph.tracing.call_options import function_options, module_options
from convmesh.graph.tracing.closed import Closed
from convmesh.graph.tracing.node_meta import LAYER, VALUE, function_name
from convmesh.graph.tracing.opaque_model import WholeValue
from convmesh.private_torch import tree_leaves


def describe(graph: fx.Graph, model: nn.Module, closed: Mapping[str, Closed]) -> Graph:
    """The nodes of `graph`, traced from `model`, and all weights of the model."""
    describer = _Describer(model, closed)
    nodes = tuple(describer.node(node) for node in graph.nodes)
    return Graph(nodes, tuple(describer.weights.values()))


class _Describer:
    def __init__(self, model: nn.Module, closed: Mapping[str, Closed]) -> None:
        self._model = model
        self._closed = closed
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        self.weights = {
            name: Weight(name, tuple(t.shape), _dtype(t), t.requires_grad, name in buffers)
            for name, t in (*parameters.items(), *buffers.items())
        }
        self._by_tensor = {id(t): self.weights[name] for name, t in (*parameters.items(), *buffers.items())}
        self._of_attribute: dict[str, tuple[Weight, ...]] = {}

    def node(self, node: fx.Node) -> Node:
        inputs = tuple(argument.name for argument in node.all_input_nodes)
        values = node.meta[VALUE] if node.op != "output" else [n.meta[VALUE] for n in node.all_input_nodes]
        kind, op, options, weights = self._described(node)
        fed = (weight for name in inputs for weight in self._of_attribute.get(name, ()))
        everything = tuple(dict.fromkeys((*weights, *(fed if node.op != "output" else ()))))
        layer = node.meta.get(LAYER, node.name)
        return Node(node.name, kind, layer, op, inputs, tuple(_values(values)), everything, options)

    def _described(self, node: fx.Node) -> tuple[str, str, dict[str, object], tuple[Weight, ...]]:
        if node.op in ("placeholder", "output"):
            return ("input" if node.op == "placeholder" else "output"), node.op, {}, ()
        if node.op == "get_attr":
            return "attribute", "attribute", {}, self._note_attribute(node)
        if node.op == "call_module":
            return self._module(node)
        if isinstance(node.target, WholeValue):
            return "opaque", type(self._model).__name__, _reason(self._closed[""]), tuple(self.weights.values())
        return *self._function(node, function_name(node)), ()

    def _note_attribute(self, node: fx.Node) -> tuple[Weight, ...]:
        weight = self.weights.get(str(node.target))
        if weight is None and isinstance(value := node.meta[VALUE], nn.Parameter) and value.requires_grad:
            # Its gradient would be left unsummed over the ranks.
            raise CaptureError(f"`{node.target}` learns, but is not a parameter of the model under that name.")
        self._of_attribute[node.name] = (weight,) if weight else ()
        return self._of_attribute[node.name]

    def _module(self, node: fx.Node) -> tuple[str, str, dict[str, object], tuple[Weight, ...]]:
        path = str(node.target)
        module = self._model.get_submodule(path)
        kind_name = parametrize.type_before_parametrizations(module).__name__
        tensors = (*module.parameters(), *module.buffers())
        weights = tuple(self._by_tensor[id(tensor)] for tensor in tensors if id(tensor) in self._by_tensor)
        if isinstance(module, parametrize.ParametrizationList):  # a weight that is computed from others
            self._of_attribute[node.name] = weights
            return "attribute", kind_name, {}, weights
        if path in self._closed:
            return "opaque", kind_name, _reason(self._closed[path]), weights
        kind = _loss(module) or kind_of(kind_name)
        options = module_options(module, _dims(node))
        return kind or "opaque", kind_name, options if kind else {**options, **_unknown(kind_name)}, weights

    def _function(self, node: fx.Node, op: str) -> tuple[str, str, dict[str, object]]:
        if not any(_values(node.meta[VALUE])):
            return ("index" if op == "setitem" else "size"), op, function_options(node, "size", (), 0)
        of_tensors = any(any(_values(argument.meta[VALUE])) for argument in node.all_input_nodes)
        kind = kind_of(op)
        if not of_tensors and kind != "noise":
            kind = "attribute"  # a factory, such as torch.zeros
        shapes = tuple(tuple(v.shape) for n in node.all_input_nodes[1:] for v in _values(n.meta[VALUE]))
        options = function_options(node, kind or "opaque", shapes, _dims(node))
        return kind or "opaque", op, options if kind else {**options, **_unknown(op)}


def _loss(module: nn.Module) -> str | None:
    return "loss" if type(module).__module__ == "torch.nn.modules.loss" else None


def _reason(closed: Closed) -> dict[str, object]:
    return {"reason": closed.reason, "line": closed.line, "whole_batch": closed.whole_batch}


def _unknown(op: str) -> dict[str, object]:
    return {"reason": f"`{op}` is an unknown operator"}


def _values(value: Any) -> Iterable[Value]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield Value(tuple(leaf.shape), _dtype(leaf))


def _dims(node: fx.Node) -> int:
    """The number of dims that windows slide along: those after samples and channels."""
    shapes = [value.shape for value in _values(node.meta[VALUE])]
    return max(len(shapes[0]) - 2, 0) if shapes else 0


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
