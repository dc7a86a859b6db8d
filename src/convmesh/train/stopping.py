"""Ctrl-C and SIGTERM end a run after a step on which all ranks agree, so that it can be saved."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from convmesh.dist import OpenMesh, Reduction

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SECONDS_BETWEEN = 0.25
"""How often ranks ask each other whether one was told to stop."""

MOST_STEPS = 64
"""The most steps between two questions, however short they are."""


class Stopping:
    """Whether to stop, asked after every step. Ranks talk about it a few times a second, all after the same step."""

    def __init__(self, mesh: OpenMesh) -> None:
        self._mesh = mesh
        self._heard = 0
        self._left = self._steps = 1
        self._asked = time.monotonic()
        self._question: Reduction | None = None
        self.signal = 0
        """The signal that ended the run, or 0."""

    def request(self, number: int = signal.SIGTERM) -> None:
        """End the run after one of the next steps."""
        self._heard = number

    def ask_now(self) -> None:
        """Have ranks ask each other after this step; call it after the same step on all of them."""
        self._left = 1

    def after_step(self) -> bool:
        """Whether this step is the last one; the same on every rank."""
        self._left -= 1
        if self._left > 0:
            return False
        self.settle()
        if not self.signal:
            self._ask()
        return bool(self.signal)

    def _ask(self) -> None:
        """Ask all ranks. The answer travels during the next steps, so that nobody waits for it."""
        now = time.monotonic()
        told = torch.tensor([float(self._heard), now - self._asked], dtype=torch.float64, device=self._mesh.device)
        self._question = Reduction([told], self._mesh, tuple(self._mesh.mesh.axes), dist.ReduceOp.MAX)
        self._asked = now
        self._left = self._steps

    def settle(self) -> None:
        """Take the answer to the last question, if there is one; all ranks have the same."""
        if self._question is None:
            return
        heard, seconds = self._question.wait()[0].tolist()
        self._question, self.signal = None, int(heard)
        self._plan_next(seconds)

    def _plan_next(self, seconds: float) -> None:
        """Every rank has the same `seconds`, so all ask next after the same number of steps."""
        pace = max(seconds / self._steps, 1e-6)
        self._steps = int(min(max(1, SECONDS_BETWEEN / pace), MOST_STEPS, 2 * self._steps))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the first signal as a request to stop; a second one ends the process as usual."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}

        def hear(number: int, frame: Any) -> None:
            del frame
            self.request(number)
            for each, handler in before.items():
                signal.signal(each, handler)

        try:
            for number in SIGNALS:
                signal.signal(number, hear)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
