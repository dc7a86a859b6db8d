"""The metadata of nodes in a traced graph, and the names of their layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import fx

from convmesh.graph.kinds import readable

VALUE = "value"
"""The key of a node's value in its `meta`: a tensor without data, or a number, shape, type or tuple of them."""

LAYER = "layer"
"""The key of the name of a node's layer in its `meta`."""

PLACE = "place"
"""The key of the file and line of the user's code that made a node, in its `meta`."""


def line_of(node: fx.Node) -> str:
    """Where the user's code makes a call: `net.py:12`; empty if that is not known."""
    file, line = node.meta.get(PLACE, ("", 0))
    return f"{Path(file).name}:{line}" if line else ""


def arguments_of(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments with values in place of nodes, in lists that the call may change, unlike the graph's own."""
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
    return tuple(map(_changeable, args)), {name: _changeable(value) for name, value in kwargs.items()}


def _changeable(value: Any) -> Any:
    if isinstance(value, list):
        return [_changeable(item) for item in value]
    if isinstance(value, dict):
        return {key: _changeable(item) for key, item in value.items()}
    return tuple(map(_changeable, value)) if type(value) is tuple else value


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
