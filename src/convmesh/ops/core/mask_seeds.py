"""Seeds of random masks: drawn from a mesh's generator, which is in step on all ranks, or inputs of a traced step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from convmesh.dist import OpenMesh
from convmesh.errors import UnsupportedError

SeedPlace = int | torch.Tensor
"""A place in the sequence of seeds: an index into a traced step's inputs, or a state of the generator."""

CAPACITY = 1024
"""Masks that a traced step may draw."""


class SeedInputs:
    """Seeds of a traced step: integers that are refilled before every replay, so masks are fresh each time."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self.used = 0

    def next(self) -> torch.Tensor:
        if self.used == len(self._values):
            raise UnsupportedError(f"a traced step draws at most {self.used} random masks; this one draws more.")
        self.used += 1
        return self._values[self.used - 1]


_INPUTS: ContextVar[SeedInputs | None] = ContextVar("seed inputs", default=None)


def next_seed(mesh: OpenMesh) -> int | torch.Tensor:
    """The seed of the next mask."""
    inputs = _INPUTS.get()
    return draw_seed(mesh) if inputs is None else inputs.next()


def draw_seed(mesh: OpenMesh) -> int:
    """Advance the generator that all ranks share."""
    return int(torch.randint(1 << 62, (), generator=mesh.seeds, device="cpu"))


@contextmanager
def same_seeds(mesh: OpenMesh, place: SeedPlace) -> Iterator[None]:
    """In here masks are drawn again from `place` on; afterwards they go on as if nothing had been drawn."""
    now = seed_place(mesh)
    _go_to(mesh, place)
    try:
        yield
    finally:
        _go_to(mesh, now)


def seed_place(mesh: OpenMesh) -> SeedPlace:
    """The current place in the sequence of seeds."""
    inputs = _INPUTS.get()
    return mesh.seeds.get_state() if inputs is None else inputs.used


def _go_to(mesh: OpenMesh, place: SeedPlace) -> None:
    inputs = _INPUTS.get()
    if isinstance(place, int) and inputs is not None:
        inputs.used = place
    else:
        assert isinstance(place, torch.Tensor)
        mesh.seeds.set_state(place)


@contextmanager
def seeds_from(values: torch.Tensor) -> Iterator[SeedInputs]:
    """In here masks take their seeds from `values`, one after the other."""
    inputs = SeedInputs(values)
    token = _INPUTS.set(inputs)
    try:
        yield inputs
    finally:
        _INPUTS.reset(token)
