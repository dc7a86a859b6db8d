"""The captured network: layers, shapes and weights as frozen values, without torch until `capture` is used."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from convmesh.graph.graph import Graph, Node, Row, Value, Weight

if TYPE_CHECKING:
    from convmesh.graph.capture import Captured, capture

__all__ = ["Captured", "Graph", "Node", "Row", "Value", "Weight", "capture"]

_LAZY = ("Captured", "capture")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'convmesh.graph' has no attribute {name!r}")
    return getattr(importlib.import_module("convmesh.graph.capture"), name)


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Python binds a submodule in its package once it is imported: here `capture` stays the function."""

    def __setattr__(self, name: str, value: object) -> None:
        is_module = name == "capture" and isinstance(value, ModuleType)
        super().__setattr__(name, vars(value)["capture"] if is_module else value)


sys.modules[__name__].__class__ = _Package
