"""Runs torch functions on tensors without data, so that torch itself checks an operator's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from convmesh.ops.core.sharded import Sharded
from convmesh.private_torch.tracing import is_traced, tree_map_only, without_modes


class Probe(torch.Tensor):
    """A tensor used only for its shape: computing with it costs nothing on a device."""

    is_made = False
    """True while a probe is being created, so that memory counters ignore it."""


class Unseen(Probe):
    """A probe while a step is traced: what is computed with it is not part of the step."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        del types
        with without_modes():
            return func(*tree_map_only(Unseen, _plain, args), **(kwargs or {}))


def _plain(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def probe(x: Sharded | torch.Tensor) -> torch.Tensor:
    """A tensor of the global shape without data: torch functions raise the same errors on it as on `x`.

    Every rank does this before anything is sent, so either all ranks stop with torch's own error or none does.
    """
    return probe_of(x.shape, x.dtype)


def probe_of(shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A probe of this shape."""
    Probe.is_made = True
    try:
        if is_traced():
            with without_modes():
                return torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(Unseen)
        return torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(Probe)
    finally:
        Probe.is_made = False


@contextmanager
def unseen() -> Iterator[None]:
    """Lets a composite function run on probes, unseen by whatever counts work and memory or traces a step."""
    with without_modes() if is_traced() else nullcontext():
        Probe.is_made = True
        try:
            yield
        finally:
            Probe.is_made = False


def is_probing(args: Any) -> bool:
    """Whether an operator runs on a probe; `Probe` is not among the types that torch dispatches on."""
    first = args[0] if args else None
    return isinstance(first[0] if isinstance(first, (list, tuple)) and first else first, Probe)
