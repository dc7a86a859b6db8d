"""Making a rank slower than it is: for every second of its own work it burns some more.

Processor time of the rank's main thread is what counts, so that waiting is not multiplied, and other processes on the
machine slow both the work and what is burnt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import nn


class SlowDown:
    """A loss that burns `factor - 1` times what the rank has worked since the last time."""

    def __init__(self, loss: Callable[..., Any], factor: float = 1.0) -> None:
        self.loss, self.factor = loss, factor
        self._since = time.thread_time()

    def __call__(self, output: Any, target: Any) -> Any:
        result = self.loss(output, target)
        self.burn()
        return result

    def watch(self, model: nn.Module) -> None:
        """Burn in backward too, at every gradient that is found: a sum must not leave before the rank is due."""
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self.burn())

    def begin(self) -> None:
        """Work counts from here on."""
        self._since = time.thread_time()

    def burn(self) -> None:
        """Pay for the work since the last time."""
        now = time.thread_time()
        end = now + (self.factor - 1) * (now - self._since)
        while time.thread_time() < end:
            pass
        self.begin()
