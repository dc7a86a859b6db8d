"""The metadata of nodes in a traced graph, and the names of their layers."""

from __future__ import annotations

from collections import Counter

from torch import fx

from convmesh.graph.kinds import readable

VALUE = "value"
"""The key of a node's value in its `meta`: a tensor without data, or a number, shape, type or tuple of them."""

LAYER = "layer"
"""The key of the name of a node's layer in its `meta`."""


def function_name(node: fx.Node) -> str:
    """The readable name of a node's function or method."""
    if isinstance(node.target, str):
        return readable(node.target)
    packet = getattr(node.target, "overloadpacket", node.target)
    return readable(getattr(packet, "__name__", str(packet)))


def fresh_layer(path: str, function: str, counts: Counter[str], taken: set[str]) -> str:
    """`path.add`, `path.add_1`, `path.add_2`..., but never the name of a module."""
    name = f"{path}.{function}" if path else function
    while True:
        numbered = f"{name}_{counts[name]}" if counts[name] else name
        counts[name] += 1
        if numbered not in taken:
            return numbered
