"""Training modes that a network reads itself, as in `F.dropout(x, 0.5, self.training)`.

A traced graph has its own copies of the attributes that it reads. Modes change between steps, so they are looked up
before each.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx, nn

_MODE = "training"


class ReadModes:
    """The modes that graphs read, and the modules of `owner` that have them."""

    def __init__(self, graphs: Iterable[nn.Module], owner: nn.Module) -> None:
        parts = [part for graph in graphs for part in graph.modules() if isinstance(part, fx.GraphModule)]
        self._pairs = [
            (part.get_submodule(path), owner.get_submodule(path)) for part in parts for path in _read_by(part)
        ]

    def follow(self) -> None:
        """Give the graphs the current modes."""
        for reader, owner in self._pairs:
            reader.training = owner.training


def _read_by(part: fx.GraphModule) -> list[str]:
    """The paths of the modules whose mode a graph reads."""
    read = (str(node.target).rpartition(".") for node in part.graph.nodes if node.op == "get_attr")
    return [path for path, _, name in read if name == _MODE]
