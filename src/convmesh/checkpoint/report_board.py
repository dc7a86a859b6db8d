"""How the ranks' writers hear from each other: notes in the job's store.

Writers run behind training, so they must not use collectives: those would mix with training's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch.distributed as dist

from convmesh.dist import OpenMesh
from convmesh.errors import CheckpointError
from convmesh.private_torch.stores import default_store

_SECONDS_PAUSE, _SECONDS_MOST = 0.001, 0.05
_SECONDS_FAREWELL = 10.0
"""How long the first rank, which may serve the store, stays so that others can read the outcome."""

Report = dict[str, Any]

_boards: dict[tuple[object, tuple[int, ...]], int] = {}
"""How many saves each set of ranks of each job has begun: all ranks count alike."""


class ReportBoard:
    """One save: every rank reports how its file went, and the first rank announces the outcome."""

    def __init__(self, mesh: OpenMesh, seconds_timeout: float) -> None:
        members = tuple(mesh.world_ranks)
        number = _boards[dist.group.WORLD, members] = _boards.get((dist.group.WORLD, members), 0) + 1
        self._rank, self._size, self._seconds = mesh.rank, mesh.mesh.size, seconds_timeout
        self._has_all = False
        self._jobs_store: Any = default_store()
        self._key = f"convmesh/checkpoint/{','.join(map(str, members))}/{number}"
        self._before = f"convmesh/checkpoint/{','.join(map(str, members))}/{number - 1}"

    @cached_property
    def _store(self) -> Any:
        """A separate connection: another thread may wait on the job's for a long time."""
        return self._jobs_store.clone()

    def report(self, report: Report) -> None:
        """Say how this rank's file went."""
        self._store.set(f"{self._key}/{self._rank}", json.dumps(report))

    def reports(self) -> list[Report]:
        """On the first rank: what all ranks reported."""
        keys = [f"{self._key}/{rank}" for rank in range(self._size)]
        self._wait(lambda: self._missing(keys))
        self._has_all = True
        # All ranks take part in this save, so none reads the notes of the previous one.
        self._forget(self._before)
        return [json.loads(self._store.get(key)) for key in keys]

    def announce(self, outcome: Report) -> None:
        """On the first rank: tell all ranks the outcome, and stay until they have read it, unless some never came."""
        self._store.set(f"{self._key}/outcome", json.dumps(outcome))
        end = time.monotonic() + (_SECONDS_FAREWELL if self._has_all else 0)
        self._poll(lambda: self._store.add(f"{self._key}/read", 0) >= self._size - 1, end)

    def outcome(self) -> Report:
        """On the other ranks: what the first one announced."""
        key = f"{self._key}/outcome"
        self._wait(lambda: [] if self._store.check([key]) else ["rank 0"])
        outcome: Report = json.loads(self._store.get(key))
        self._store.add(f"{self._key}/read", 1)
        return outcome

    def _missing(self, keys: list[str]) -> list[str]:
        if self._store.check(keys):
            return []
        return [f"rank {rank}" for rank, key in enumerate(keys) if not self._store.check([key])]

    def _wait(self, missing: Callable[[], list[str]]) -> None:
        if not self._poll(lambda: not missing(), time.monotonic() + self._seconds):
            raise CheckpointError(
                f"rank {self._rank} waited {self._seconds:g} s for {', '.join(missing()[:8])} to write a checkpoint."
            )

    def _poll(self, is_done: Callable[[], bool], end: float) -> bool:
        pause = _SECONDS_PAUSE
        while not (done := is_done()) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, _SECONDS_MOST)
        return done

    def _forget(self, key: str) -> None:
        for name in (*map(str, range(self._size)), "outcome", "read"):
            self._store.delete_key(f"{key}/{name}")
