"""Whether work is written out in elementary operators, for a compiler to fuse, or left to named kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_FUSES: ContextVar[bool] = ContextVar("fuses", default=False)


def is_fused() -> bool:
    """Whether what runs now is being traced for a compiler that fuses."""
    return _FUSES.get()


@contextmanager
def fusing() -> Iterator[None]:
    """Operators are written out in here."""
    token = _FUSES.set(True)
    try:
        yield
    finally:
        _FUSES.reset(token)
