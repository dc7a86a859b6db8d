"""Running a module's forward without leaving anything behind in it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_CONTAINERS = (dict, list, set, OrderedDict)


@contextmanager
def unchanged(*modules: nn.Module) -> Iterator[None]:
    """Restore modules and their parts afterwards: attributes, and the contents of lists, dicts and sets."""
    kept = [_Kept(part) for module in modules for part in module.modules()]
    try:
        yield
    finally:
        for part in kept:
            part.restore()


class _Kept:
    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(module.__dict__)
        values = self._attributes.values()
        containers = (value for value in values if type(value) in _CONTAINERS)
        # Nearly all are tables of hooks without any; a copy of each takes longer than the rest together.
        self._contents = [(container, container.copy() if container else ()) for container in containers]

    def restore(self) -> None:
        self._module.__dict__.clear()
        self._module.__dict__.update(self._attributes)
        for container, content in self._contents:
            if container or content:
                _refill(container, content)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)
