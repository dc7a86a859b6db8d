"""Layer options that are one number for all dims of space, or one per dim."""

from __future__ import annotations

from collections.abc import Sequence

from convmesh.errors import UnsupportedError

Ints = int | Sequence[int]


def spread(name: str, value: Ints, dims: int, smallest: int = 1) -> tuple[int, ...]:
    """One number for each dim, from one for all or one per dim."""
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    values = values * dims if len(values) == 1 else values
    if len(values) != dims or min(values) < smallest:
        raise UnsupportedError(f"`{name}` (={value}) must be one or {dims} whole numbers of at least {smallest}.")
    return values
