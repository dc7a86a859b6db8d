"""An error that ends one rank ends all of them, each with the same message, instead of a hang or a torn connection."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from convmesh.dist.agreement import problems_of
from convmesh.errors import ConvMeshError, LostRankError, RunError
from convmesh.private_torch.stores import default_store

_SECONDS_TO_HEAR, _SECONDS_ALIKE, _SECONDS_FAREWELL, _SECONDS_PAUSE = 2.0, 1.0, 5.0, 0.02
"""How long a rank whose connection broke waits for the reason; how long one that failed waits for others that failed
the same way, before it breaks its connections; and how long the first rank then serves the reason to others."""

_fates = itertools.count()
"""All ranks share the same number of fates, in the same order: each has its own keys in the job's store."""


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
    key = f"convmesh/train/fate/{next(_fates)}"
    try:
        yield
    except Exception as error:
        if dist.get_world_size() == 1:
            raise
        fate = _Fate(default_store(), key, dist.get_world_size())
        is_lost = isinstance(error, LostRankError)
        told = fate.heard() if is_lost or not isinstance(error, ConvMeshError) else ""
        if told:
            raise RunError(told) from error
        if not is_lost:  # nobody can tell the others more about a lost rank than they find out themselves
            fate.tell(error)
        raise


def _break_connections() -> None:
    """Not on GPUs: NCCL would wait here for the ranks that wait for this one, and they would notice nothing. There the
    end of this process ends the others, through whatever started them."""
    if dist.get_backend() != "nccl":
        dist.destroy_process_group()


@dataclass(frozen=True)
class _Fate:
    """The end of a run, as ranks write it to the job's store, which may vanish with the rank that serves it."""

    store: Any
    key: str
    ranks: int

    def heard(self) -> str:
        """What another rank reported, or nothing."""
        with contextlib.suppress(Exception):
            if self._within(_SECONDS_TO_HEAR, lambda: self.store.check([self.key])):
                text: str = self.store.get(self.key).decode()
                self.store.add(f"{self.key}/know", 1)
                return text
        return ""

    def tell(self, error: Exception) -> None:
        """Leave word. Unless all ranks have failed the same way, break the connections on which they wait."""
        rank, kind = dist.get_rank(), "" if isinstance(error, ConvMeshError) else f"{type(error).__name__}: "
        with contextlib.suppress(Exception):
            if self.store.add(f"{self.key}/told", 1) == 1:
                self.store.set(self.key, f"rank {rank} failed: {kind}{error}")
            self.store.add(f"{self.key}/know", 1)
            if not self._within(_SECONDS_ALIKE, self._all_know):
                _break_connections()
                self._within(_SECONDS_FAREWELL if rank == 0 else 0.0, self._all_know)

    def _all_know(self) -> bool:
        return bool(self.store.add(f"{self.key}/know", 0) >= self.ranks)

    def _within(self, seconds: float, is_so: Callable[[], bool]) -> bool:
        end = time.monotonic() + seconds
        while not (so := is_so()) and time.monotonic() < end:
            time.sleep(_SECONDS_PAUSE)
        return so
