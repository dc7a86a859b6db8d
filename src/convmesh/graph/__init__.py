"""The captured network: layers, shapes and weights as frozen values, without torch until `capture` is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from convmesh.graph.graph import Graph, Node, Row, Value, Weight

if TYPE_CHECKING:
    from convmesh.graph.captured import Captured, capture, compared

__all__ = ["Captured", "Graph", "Node", "Row", "Value", "Weight", "capture", "compared"]

_LAZY = ("Captured", "capture", "compared")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'convmesh.graph' has no attribute {name!r}")
    return getattr(importlib.import_module("convmesh.graph.captured"), name)


def __dir__() -> list[str]:
    return __all__
