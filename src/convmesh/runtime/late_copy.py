"""Copies of what only an optimiser changes, made while the next step computes: only its update waits for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from convmesh.errors import CheckpointError
from convmesh.private_torch.tensor_internals import version_of

Pair = tuple[torch.Tensor, torch.Tensor]
"""Target and source of a copy."""


class LateCopy:
    """Copies made by another thread; every optimiser's next update waits for them."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = list(pairs)
        self._versions = [version_of(source) for _, source in self._pairs]
        self._done = threading.Event()
        if self._pairs:
            _watch_updates()
            _pending.append(self)

    @torch.no_grad()
    def make(self) -> None:
        """Copy now. Values that changed before they were copied are an error: they belong to no step."""
        try:
            for target, source in self._pairs:
                target.copy_(source)
            versions = [version_of(source) for _, source in self._pairs]
        finally:
            self._pairs.clear()
            self._done.set()
        if versions != self._versions:
            raise CheckpointError(
                "weights changed while they were being saved, and not by an optimiser; call `checkpointer.wait()` "
                "before you change them, or save with asynchronous=False."
            )

    def wait(self) -> None:
        self._done.wait()


_pending: list[LateCopy] = []


@cache
def _watch_updates() -> None:
    register_optimizer_step_pre_hook(_wait_for_copies)


def _wait_for_copies(optimizer: Any, args: Any, kwargs: Any) -> None:
    del optimizer, args, kwargs
    settle_copies()


def settle_copies() -> None:
    """Return when all copies are made; call it before weights change other than by an optimiser."""
    while _pending:
        _pending.pop().wait()
