"""Running a module's forward without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Afterwards the attributes of a module and its parts are as they were, whatever a forward stored in them."""
    kept = [(part, dict(part.__dict__)) for part in module.modules()]
    try:
        yield
    finally:
        for part, attributes in kept:
            part.__dict__.clear()
            part.__dict__.update(attributes)
