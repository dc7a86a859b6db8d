"""An error that ends one rank ends all of them, each with the same message, instead of a hang or a torn connection."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from convmesh.dist.agreement import problems_of
from convmesh.errors import ConvMeshError, RunError
from convmesh.private_torch.stores import default_store

_TOLD, _READ = "convmesh/train/failed", "convmesh/train/failed/read"
_SECONDS_TO_HEAR, _SECONDS_FAREWELL, _SECONDS_PAUSE = 2.0, 5.0, 0.02
"""How long a rank whose connection broke waits for the reason, and how long the first rank serves it to others."""


@contextmanager
def together() -> Iterator[None]:
    """A step of setting up that may fail on some ranks: all raise if one does."""
    error: ConvMeshError | None = None
    try:
        yield
    except ConvMeshError as raised:
        error = raised
    group: Any = dist.group.WORLD
    told = problems_of(group, dist.get_world_size(), None if error is None else str(error))
    if error is not None:
        raise error
    if told:
        raise RunError("; ".join(told))


@contextmanager
def shared_fate() -> Iterator[None]:
    """While training: tell the others why this rank ends, or learn why another one did."""
    try:
        yield
    except Exception as error:
        if dist.get_world_size() == 1:
            raise
        store = default_store()
        told = "" if isinstance(error, ConvMeshError) else _heard(store)
        if told:
            raise RunError(told) from error
        _tell(store, error)
        raise


def _heard(store: Any) -> str:
    """What another rank told, or nothing."""
    end = time.monotonic() + _SECONDS_TO_HEAR
    with contextlib.suppress(Exception):  # the store may have gone with the rank that served it
        while time.monotonic() < end:
            if store.check([_TOLD]):
                text: str = store.get(_TOLD).decode()
                store.add(_READ, 1)
                return text
            time.sleep(_SECONDS_PAUSE)
    return ""


def _tell(store: Any, error: Exception) -> None:
    """Leave word, break the connections that others wait at, and serve the store until they have read it."""
    rank, others = dist.get_rank(), dist.get_world_size() - 1
    kind = "" if isinstance(error, ConvMeshError) else f"{type(error).__name__}: "
    with contextlib.suppress(Exception):
        if store.add(f"{_TOLD}/count", 1) == 1:
            store.set(_TOLD, f"rank {rank} failed: {kind}{error}")
        dist.destroy_process_group()
        end = time.monotonic() + _SECONDS_FAREWELL
        while rank == 0 and time.monotonic() < end and store.add(_READ, 0) < others:
            time.sleep(_SECONDS_PAUSE)
