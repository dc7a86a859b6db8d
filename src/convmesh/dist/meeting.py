"""Where ranks meet before they open a mesh: at the job's store.

A process group is opened by all of its ranks at once, so ranks that name different members wait for each other until
the job's time-out. Here each rank first writes down whom it waits for. One that has waited for a while reads what the
others wrote: if ranks wait for each other in a circle, none of them can go on, and all raise the same kind of error.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from convmesh.errors import ConvMeshError, DisagreementError
from convmesh.private_torch.stores import default_store

Store = Any
"""A `torch.distributed.Store`, which torch does not annotate."""

_SECONDS_PAUSE, _SECONDS_LOOK, _SECONDS_MOST = 0.001, 1.0, 30.0
"""A waiting rank's first pause, when it first looks around, and the longest time between two looks."""

NO_TIMEOUT = timedelta(minutes=30)
"""Of jobs that name none; torch has it for Gloo."""

_WAITING, _REFUSED = "convmesh/waiting", "convmesh/refused"
"""Counts of the sets of ranks being waited for, and of failed calls: at one and none there is no circle."""

_calls = itertools.count(1)
_met: dict[tuple[object, tuple[int, ...]], int] = {}
"""How often this rank has met each set of ranks of each job: each meeting has its own gate."""


@dataclass(frozen=True)
class Claim:
    """What a rank wrote down: whom it waits for, and at which gate."""

    rank: int
    members: tuple[int, ...]
    opens: str
    gate: str
    call: int
    """Which of the rank's calls it is."""
    refusal: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.refusal or f'opens {self.opens}'}"


def meet(members: tuple[int, ...], opens: str, timeout: timedelta | None) -> None:
    """Return once all `members` are here, each naming the same members; `opens` is what errors call their mesh."""
    if dist.get_backend() == "fake":  # one process stands for the whole job: nobody will come
        return
    job, everyone = dist.group.WORLD, tuple(sorted(members))
    number = _met.get((job, everyone), 0)
    gate = f"convmesh/gate/{','.join(map(str, everyone))}/{number}"
    claim = Claim(dist.get_rank(), everyone, opens, gate, next(_calls))
    store = default_store()
    _write(store, claim)
    arrived = store.add(gate, 1)
    if arrived == 1:
        store.add(_WAITING, 1)
    if arrived == len(everyone):
        store.add(_WAITING, -1)
        store.set(f"{gate}/open", "")
    _wait(store, claim, NO_TIMEOUT if timeout is None else timeout)
    _met[job, everyone] = number + 1


@contextmanager
def telling_refusals() -> Iterator[None]:
    """Tell ranks that wait for this one about an error that keeps it from coming."""
    try:
        yield
    except ConvMeshError as error:
        if dist.is_initialized():
            store = default_store()
            _write(store, Claim(dist.get_rank(), (), "", "", next(_calls), f"was refused: {error}"))
            store.add(_REFUSED, 1)
        raise


def _wait(store: Store, claim: Claim, timeout: timedelta) -> None:
    """Wait until the gate opens. The store is polled: its own wait would print time-out warnings."""
    began, pause, look = time.monotonic(), _SECONDS_PAUSE, _SECONDS_LOOK
    while not store.check([f"{claim.gate}/open"]):
        waited = time.monotonic() - began
        if waited > look:
            _look_around(store, claim, is_late=waited > timeout.total_seconds())
            look = waited + min(2 * look, _SECONDS_MOST)
        time.sleep(pause)
        pause = min(2 * pause, _SECONDS_LOOK / 4)


def _look_around(store: Store, claim: Claim, is_late: bool) -> None:
    """Give up if the others can never come, or have not come in time."""
    if problem := _deadlock(store, claim) or (_missing(store, claim) if is_late else ""):
        _leave(store, claim)
        raise DisagreementError(problem)


def _leave(store: Store, claim: Claim) -> None:
    """Give up a gate; the claim stays, so that ranks which look later see the same circle."""
    store.add(_REFUSED, 1)
    if store.add(claim.gate, -1) == 0:
        store.add(_WAITING, -1)


def _deadlock(store: Store, claim: Claim) -> str:
    """Why this rank would wait for ever; empty if it would not."""
    if store.add(_WAITING, 0) < 2 and not store.add(_REFUSED, 0):
        return ""
    circle = _circle(store, claim, (claim,))
    if not circle:
        return ""
    told = "; ".join(str(each) for each in sorted(circle, key=lambda each: each.rank))
    return f"`ranks` must be the same on every rank of a mesh, but {told}. Pass the same `mesh` and `ranks` on all."


def _circle(store: Store, claim: Claim, path: tuple[Claim, ...]) -> tuple[Claim, ...]:
    """Ranks that wait for each other, starting from a claim; or those that wait for one that was refused."""
    for rank in claim.members:
        other = _read(store, rank) if rank != claim.rank else None
        if other is None or other.gate == claim.gate:
            continue
        if other.refusal:
            # The rank caught a refusal of an earlier call, or it would not have reached this one.
            if other.call >= claim.call:
                return (*path, other)
            continue
        if not store.check([f"{other.gate}/open"]):
            if other in path:
                return path[path.index(other) :]
            if circle := _circle(store, other, (*path, other)):
                return circle
    return ()


def _missing(store: Store, claim: Claim) -> str:
    others = {rank: _read(store, rank) for rank in claim.members}
    absent = [(rank, other) for rank, other in others.items() if other is None or other.gate != claim.gate]
    told = "; ".join(str(other) if other else f"rank {rank} has not called `open_mesh`" for rank, other in absent[:8])
    return f"rank {claim.rank} opens {claim.opens} and waits: {told}. Pass the same `mesh` and `ranks` on all of them."


def _write(store: Store, claim: Claim) -> None:
    store.set(f"convmesh/claim/{claim.rank}", json.dumps(asdict(claim)))


def _read(store: Store, rank: int) -> Claim | None:
    key = f"convmesh/claim/{rank}"
    if not store.check([key]):
        return None
    written: dict[str, Any] = json.loads(store.get(key))
    return Claim(**{**written, "members": tuple(written["members"])})
