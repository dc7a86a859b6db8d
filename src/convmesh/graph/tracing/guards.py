"""Checks inside a captured graph: a number that Python used while tracing must be the same when it runs."""

from __future__ import annotations

from typing import Any

from convmesh.errors import CaptureError


def guard(value: Any, captured: Any, line: str) -> None:
    """Refuse to run a graph whose loops or branches were traced for another shape."""
    if value != captured:
        raise CaptureError(
            f"the network was captured where {line} gives {captured}, but this input gives {value}; capture it "
            "with a sample of this shape."
        )
