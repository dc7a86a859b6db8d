"""A step's loss as a number, read when it is needed: on a GPU that is a step later, so nobody waits for it."""

from __future__ import annotations

import torch


class LateLoss:
    """Copied to the host behind the step's own work; `value` waits for that copy alone."""

    def __init__(self, loss: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = loss.detach()
        if loss.is_cuda:
            self._host = torch.empty((), dtype=loss.dtype, pin_memory=True).copy_(self._host, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(loss.device))

    @property
    def is_ready(self) -> bool:
        return self._event is None or self._event.query()

    @property
    def value(self) -> float:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return float(self._host)
