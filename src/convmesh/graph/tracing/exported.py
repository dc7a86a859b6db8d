"""The network as torch.export sees it, for models whose own forward cannot be traced.

Export runs the forward on tensors without data and records aten calls. The calls of one torch.nn module become one call
of that module again, so that it keeps its mode, buffers and name; all others become torch functions.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from convmesh.graph.tracing.aten import SKIPPED, torch_call
from convmesh.graph.tracing.closed import OWN_GRADIENTS, ClosedError
from convmesh.graph.tracing.evaluate import Evaluator
from convmesh.graph.tracing.intercepted_torch import without_own_gradients
from convmesh.graph.tracing.node_meta import LAYER, VALUE, fresh_layer, function_name
from convmesh.private_torch import tree_leaves, tree_unflatten
from convmesh.private_torch.exporting import calling_module, is_guard
from convmesh.private_torch.module_tables import children_of


def exported(
    model: nn.Module, samples: Mapping[str, torch.Tensor], evaluator: Evaluator
) -> tuple[fx.Graph, dict[str, torch.Tensor]]:
    """The graph of `model` with its values, and constants that are not attributes of the model."""
    inputs = tuple(torch.empty(x.shape, dtype=x.dtype, device=evaluator.home) for x in samples.values())
    batch = tuple({0: torch.export.Dim.AUTO} if x.ndim else None for x in inputs)
    with warnings.catch_warnings(), without_own_gradients(_refuse_own_gradients):
        warnings.simplefilter("ignore")
        program = torch.export.export(model, inputs, dynamic_shapes=batch, strict=False)
        exported = program.module()
    writer = _Writer(model, samples, evaluator, exported)
    for node in exported.graph.nodes:
        writer.add(node)
    flat = tree_leaves([*exported.graph.nodes][-1].args[0])
    outputs = [writer.new.get(leaf, leaf) if isinstance(leaf, fx.Node) else leaf for leaf in flat]
    spec = program.call_spec.out_spec
    assert spec is not None
    writer.graph.output(tree_unflatten(outputs, spec))
    return writer.graph, writer.constants


def _refuse_own_gradients() -> None:
    raise ClosedError(OWN_GRADIENTS)


class _Writer:
    """Rewrites the graph call by call."""

    def __init__(
        self, model: nn.Module, samples: Mapping[str, torch.Tensor], evaluator: Evaluator, exported: nn.Module
    ) -> None:
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self._model, self._evaluator, self._exported = model, evaluator, exported
        self._samples = iter(samples.items())
        self._own: dict[str, torch.Tensor] = dict(model.named_buffers(remove_duplicate=False))
        self._own.update(model.named_parameters(remove_duplicate=False))
        self._first_names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        self._taken = {name for name, _ in model.named_modules()}
        self._counts: dict[str, Counter[str]] = {}
        self._module_calls = _module_calls(model, exported.graph)  # type: ignore[arg-type]

    def add(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            name, value = next(self._samples)
            self._keep(node, self.graph.placeholder(name), value, name)
        elif node.op == "get_attr":
            self._attribute(node)
        elif node in self._module_calls:
            if self._module_calls[node] is not None:
                path, argument = self._module_calls[node]
                self._call(node, "call_module", path, (self.new[argument],), {}, path)
        elif node.op == "call_function":
            self._function(node)
        elif node.op == "call_module" and not is_guard(node):
            raise ClosedError(f"torch.export made a part of it a graph of its own (`{node.target}`)")

    def _attribute(self, node: fx.Node) -> None:
        path = str(node.target)
        if not node.users or all(user in self._module_calls for user in node.users):
            return
        value = self._own.get(path)
        if value is None:
            value = getattr(self._exported, path)
            if not isinstance(value, torch.Tensor):
                raise ClosedError(f"torch.export made a part of it a graph of its own (`{path}`)")
            self.constants[path] = value
        path = self._first_names.get(id(value), path)  # a tensor with several names goes by the first, as everywhere
        created = self.graph.create_node("get_attr", path)
        self._keep(node, created, self._evaluator.tensor(value), path)

    def _function(self, node: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda argument: self.new[argument])
        packet = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        if packet in SKIPPED:
            return
        call = torch_call(packet, args, dict(kwargs)) if packet else None
        function, args, kwargs = call or (node.target, args, kwargs)
        kind = "call_method" if isinstance(function, str) else "call_function"
        self._call(node, kind, function, args, kwargs, None)

    def _call(self, node: fx.Node, kind: str, target: Any, args: Any, kwargs: Any, layer: str | None) -> None:
        created = self.graph.create_node(kind, target, args, kwargs)
        given = fx.node.map_arg((created.args, created.kwargs), lambda argument: argument.meta[VALUE])
        value = self._evaluator.call(kind, target, *given)
        key, path = calling_module(node)
        name = layer or fresh_layer(path, function_name(created), self._counts.setdefault(key, Counter()), self._taken)
        self._keep(node, created, value, name)

    def _keep(self, node: fx.Node, created: fx.Node, value: Any, layer: str) -> None:
        created.meta.update({VALUE: value, LAYER: layer})
        self.new[node] = created


def _module_calls(model: nn.Module, graph: fx.Graph) -> dict[fx.Node, Any]:
    """Nodes inside calls of simple torch.nn modules: a result maps to the path and input, other nodes to None."""
    calls: dict[tuple[str, str], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and _is_simple(model, calling_module(node)[1]):
            calls.setdefault(calling_module(node), []).append(node)
    inside_calls: dict[fx.Node, Any] = {}
    for (_, path), nodes in calls.items():
        inside = set(nodes)
        given = {a: None for n in nodes for a in n.all_input_nodes if a not in inside and a.op != "get_attr"}
        results = [n for n in nodes if any(user not in inside for user in n.users)]
        if len(given) == len(results) == 1:
            inside_calls |= dict.fromkeys(nodes)
            inside_calls[results[0]] = path, next(iter(given))
    return inside_calls


def _is_simple(model: nn.Module, path: str) -> bool:
    """Whether it is a torch.nn module without submodules that takes one tensor."""
    if not path:
        return False
    module = model.get_submodule(path)
    is_torchs = type(module).__module__.startswith("torch.nn.modules") and not children_of(module)
    return is_torchs and len(inspect.signature(module.forward).parameters) == 1
