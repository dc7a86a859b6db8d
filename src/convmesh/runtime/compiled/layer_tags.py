"""Which layer each operator of a traced step belongs to: noted during tracing, read when the step is cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from convmesh.private_torch.tracing import graph_being_traced

_KEY = "convmesh_layer"
BETWEEN = "+"
"""Joins the names of layers that run as one."""


class LayerTags:
    """A listener: what is traced between `enter` and `leave` belongs to the layer."""

    def __init__(self) -> None:
        self._layer = ""
        self._before: fx.Node | None = None

    def enter(self, layer: str, phase: str) -> None:
        del phase
        self._layer, self._before = layer, last_traced()

    def leave(self) -> None:
        if self._before is None:
            return
        for node in traced_since(self._before):
            node.meta.setdefault(_KEY, self._layer)
        self._before = None


def last_traced() -> fx.Node:
    """The last operator of the graph that is being traced."""
    node: fx.Node = next(iter(reversed(graph_being_traced().nodes)))
    return node


def traced_since(node: fx.Node) -> Iterator[fx.Node]:
    """The operators traced after this one."""
    end = last_traced()
    while node is not end:
        node = node.next
        yield node


def layers_of(nodes: Iterable[fx.Node]) -> str:
    """The layers of a run of operators, in order."""
    return BETWEEN.join(dict.fromkeys(filter(None, (node.meta.get(_KEY, "") for node in nodes))))
