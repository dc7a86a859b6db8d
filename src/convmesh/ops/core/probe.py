"""Letting torch itself read an operator's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from convmesh.ops.core.sharded import Sharded


class Probe(torch.Tensor):
    """A tensor of which only the shape is asked: what is computed with it costs a device nothing."""

    is_made = False
    """While one is being made: whoever counts memory looks away."""


def probe(x: Sharded | torch.Tensor) -> torch.Tensor:
    """A tensor of the global shape without data: run on it, a torch function refuses what it would refuse of `x`.

    Every rank does so before anything is sent, so all of them stop with torch's own error, or none.
    """
    return probe_of(x.shape, x.dtype)


def probe_of(shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """The same for a shape."""
    Probe.is_made = True
    try:
        return torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(Probe)
    finally:
        Probe.is_made = False


def is_probing(args: Any) -> bool:
    """Whether an operator only reads its arguments; among the types that torch dispatches on, `Probe` is not listed."""
    first = args[0] if args else None
    return isinstance(first[0] if isinstance(first, (list, tuple)) and first else first, Probe)
