"""What nodes of a traced graph know of themselves, and how their layers are named."""

from __future__ import annotations

from collections import Counter

from torch import fx

from convmesh.graph.kinds import readable

VALUE = "value"
"""Under this key a node's `meta` holds its value: a tensor without data, or a number, shape, type, tuple as it is."""

LAYER = "layer"
"""Under this key a node's `meta` holds the name of its layer."""


def function_name(node: fx.Node) -> str:
    """What a reader calls the function or method of a node."""
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
