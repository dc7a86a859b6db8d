"""The lowered network as a module that runs on shards: the traced calls, and changes of layout between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch.nn.functional as F
from torch import fx, nn

from convmesh.dist import OpenMesh
from convmesh.graph import Captured, Node
from convmesh.graph.weightless import parts_of
from convmesh.layout.channels import Sums
from convmesh.lowering.arrange import Role, arrange
from convmesh.lowering.dense_functions import weights_of_call
from convmesh.lowering.lowered import Lowered
from convmesh.lowering.node_calls import function_of
from convmesh.lowering.opaque import is_opaque, run_opaque
from convmesh.ops.channels.channel_layers import cut_embedding, cut_linear, is_cut
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.elementwise.noise import drawn
from convmesh.plans import Plan, Split
from convmesh.runtime.graph_regions import graph_module, replace_regions
from convmesh.runtime.placing import in_view
from convmesh.runtime.recompute import Recomputed


def executable(captured: Captured, lowered: Lowered, mesh: OpenMesh) -> fx.GraphModule:
    """The network on `Sharded` tensors of `mesh`."""
    parts = parts_of(captured.module)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(captured.module.graph, copies)
    graph.output(result)
    arranged: dict[str, fx.Node] = {}
    for node, copy in copies.items():
        _rearrange(graph, parts, copy, node.name, lowered, arranged)
        _adapt(parts, copy, node, captured, lowered, mesh)
    recompute(graph, parts, captured, lowered.plan, mesh)
    graph.lint()
    return graph_module(parts, graph)


def _rearrange(
    graph: fx.Graph, parts: dict[str, Any], node: fx.Node, name: str, lowered: Lowered, arranged: dict[str, fx.Node]
) -> None:
    """Insert the change of layout that a node needs before it, or use an earlier node's."""
    if name in lowered.arranged:
        path = parts_name("arrange", name)
        parts[path] = Arrange(*lowered.arranged[name])
        with graph.inserting_before(node):
            arranged[name] = graph.call_module(path, node.args[:1])
    change = arranged.get(lowered.shared.get(name, name))
    if change is not None:
        node.args = (change, *node.args[1:])


def _adapt(
    parts: dict[str, Any], node: fx.Node, original: fx.Node, captured: Captured, lowered: Lowered, mesh: OpenMesh
) -> None:
    """Replace the calls of modules that were not traced, and of nodes that sum weight gradients in backward."""
    spec = captured.graph.node(original.name)
    call: Any
    module = parts[str(node.target)] if node.op == "call_module" else None
    if module is not None and is_opaque(spec.kind, module):
        node.target = parts_name("opaque", original.name)
        parts[node.target] = Opaque(module, spec)
    sums = lowered.plan.split(spec.layer).sums
    if isinstance(module, (nn.Linear, nn.Embedding)) and sums != "channel":
        node.target = parts_name("sums", original.name)
        parts[node.target] = SummedElsewhere(module, sums)
    if weights_of_call(node) and sums != "channel":
        node.op, node.target = "call_module", parts_name("sums", original.name)
        parts[node.target] = ProductSummedElsewhere(sums)
    if spec.kind == "noise" and node.op != "call_module":
        call = function_of(node.op, node.target)
        node.op, node.target = "call_module", parts_name("drawn", original.name)
        parts[node.target] = Drawn(call, mesh)
    if original.name in lowered.eager:
        call = parts[str(node.target)] if node.op == "call_module" else function_of(node.op, node.target)
        node.op, node.target = "call_module", parts_name("summed", original.name)
        parts[node.target] = SummedInBackward(call, mesh)


def parts_name(purpose: str, node: str) -> str:
    return f"convmesh_{purpose}_{node}"


class Arrange(nn.Module):
    """Changes a tensor's layout to the one of a layer's split."""

    def __init__(self, split: Split, role: Role) -> None:
        super().__init__()
        self._split, self._role = split, role

    def forward(self, x: Sharded) -> Sharded:
        return arrange(x, self._split, self._role)

    def extra_repr(self) -> str:
        return str(self._split)


class SummedElsewhere(nn.Module):
    """A dense layer or an embedding whose partial outputs are not summed into parts of its features."""

    def __init__(self, layer: nn.Linear | nn.Embedding, sums: Sums) -> None:
        super().__init__()
        self.layer, self._sums = layer, sums

    def forward(self, x: Sharded) -> Sharded:
        layer, weight = self.layer, self.layer.weight
        if not is_cut(weight):
            return cast("Sharded", layer(x))
        if isinstance(layer, nn.Embedding):
            return cut_embedding(x, weight, layer.padding_idx, self._sums)
        return cut_linear(x, weight, layer.bias, self._sums)


class ProductSummedElsewhere(nn.Module):
    """The same for a call of `F.linear`."""

    def __init__(self, sums: Sums) -> None:
        super().__init__()
        self._sums = sums

    def forward(self, x: Sharded, weight: Any, bias: Any = None) -> Sharded:
        return cut_linear(x, weight, bias, self._sums) if is_cut(weight) else cast("Sharded", F.linear(x, weight, bias))  # type: ignore[arg-type]


class Opaque(nn.Module):
    """A module that was not traced, on each rank's whole samples or on all of them."""

    def __init__(self, module: nn.Module, spec: Node) -> None:
        super().__init__()
        self.module, self._spec = module, spec

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return run_opaque(self.module, self._spec, *args, **kwargs)


class Drawn(nn.Module):
    """A call that draws random numbers, the same on every rank."""

    def __init__(self, call: Callable[..., Any], mesh: OpenMesh) -> None:
        super().__init__()
        self._call, self._mesh = call, mesh

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return drawn(self._mesh, self._call, args, kwargs)


class SummedInBackward(nn.Module):
    """A call whose backward sums the gradients of its weights, in place of the reducer."""

    def __init__(self, call: Callable[..., Any], mesh: OpenMesh) -> None:
        super().__init__()
        self.call, self._mesh = call, mesh
        self._summing = mesh.with_settings(mesh.settings.summing_weights())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = in_view((args, kwargs), self._summing)
        return in_view(self.call(*args, **kwargs), self._mesh)


def recompute(graph: fx.Graph, parts: dict[str, Any], captured: Captured, plan: Plan, mesh: OpenMesh) -> None:
    """Replace each run of nodes in a module that the plan recomputes by one block."""
    if not plan.checkpoint:
        return
    layers = {node.name: node.layer for node in captured.graph.nodes}

    def block(node: fx.Node) -> str | None:
        path = layers.get(node.name) or layers.get(_arranged_for(node))
        return plan.recomputed(path) if path else None

    replace_regions(graph, parts, block, lambda module: Recomputed(module, mesh))


def _arranged_for(node: fx.Node) -> str:
    return str(node.target).removeprefix("convmesh_arrange_")
