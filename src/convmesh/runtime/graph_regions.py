"""Parts of a traced graph as modules: recomputed blocks, stages of a pipeline, local runs of a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from convmesh.private_torch.graph_sources import forget_source_of

Parts = Mapping[str, Any]
"""Modules, parameters and buffers by the paths that a graph uses for them."""


@dataclass(frozen=True)
class GraphRegion:
    """A run of nodes as a module: it takes the values of `inputs` and returns a tuple of those of `outputs`."""

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def region(parts: Parts, nodes: Sequence[fx.Node]) -> GraphRegion:
    """The nodes as a module. It reads attributes itself, even those that nodes outside read."""
    inside = {*nodes}
    inputs = dict.fromkeys(
        source for node in nodes for source in node.all_input_nodes if source not in inside and source.op != "get_attr"
    )
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users) and node.op != "get_attr")
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {source: graph.placeholder(source.name) for source in inputs}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in copies:  # an attribute that a node outside reads
                copies[source] = graph.node_copy(source, copies.__getitem__)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return GraphRegion(graph_module(parts, graph), tuple(inputs), outputs)


def graph_module(parts: Parts, graph: fx.Graph) -> fx.GraphModule:
    """A module that runs `graph` on the parts that it calls and reads."""
    module = fx.GraphModule(dict(parts), graph)
    forget_source_of(module)
    return module


def replace_regions(
    graph: fx.Graph,
    parts: dict[str, Any],
    key: Callable[[fx.Node], str | None],
    wrap: Callable[[fx.GraphModule], nn.Module],
) -> None:
    """Replace each run of nodes with the same `key` by one call; nodes whose key is None stay."""
    for index, (name, nodes) in enumerate(_runs(graph, key)):
        block = region(parts, nodes)
        if not block.outputs:
            continue
        path = f"convmesh_region_{index}_{name.replace('.', '_')}"
        parts[path] = wrap(block.module)
        # After the last node: all inputs are computed by then, and all users come later.
        with graph.inserting_after(nodes[-1]):
            call = graph.call_module(path, block.inputs)
        with graph.inserting_after(call):
            for place, node in reversed(list(enumerate(block.outputs))):
                node.replace_all_uses_with(graph.call_function(_item, (call, place)))
        for node in reversed(nodes):
            graph.erase_node(node)


def _item(values: Sequence[Any], index: int) -> Any:
    return values[index]


def _runs(graph: fx.Graph, key: Callable[[fx.Node], str | None]) -> Iterator[tuple[str, list[fx.Node]]]:
    work = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    for name, nodes in itertools.groupby(work, key):
        listed = list(nodes)
        if name is not None:
            yield name, listed
