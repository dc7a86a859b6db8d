"""Our own warnings on the terminal: what they say, without the place in our code that issued them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warns_in_a_line() -> Iterator[None]:
    """Show ConvMesh's warnings as it shows errors; those of other packages stay as they are."""
    usual = warnings.formatwarning

    def formatted(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None) -> str:
        if category.__module__.startswith("convmesh."):
            return f"convmesh: warning: {message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = formatted  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.formatwarning = usual
