"""Whether a loss is NaN, asked without making the host wait for a GPU."""

from __future__ import annotations

import torch


class NanFlag:
    """Set when the loss is computed, read when first asked; on a GPU, ask a step later."""

    def __init__(self, loss: torch.Tensor) -> None:
        told = loss.detach()
        told = told if told.numel() == 1 else told.isnan().any()
        self._event: torch.cuda.Event | None = None
        if not told.is_cuda:
            self._told = told
            return
        # Pinned memory and an event: reading the tensor itself would wait for all work queued by then.
        self._told = torch.empty(told.shape, dtype=told.dtype, pin_memory=True).copy_(told, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(told.device))

    def __bool__(self) -> bool:
        if self._event is not None:
            self._event.synchronize()
        return bool(self._told if self._told.dtype == torch.bool else self._told.isnan())


def can_be_read(loss: torch.Tensor) -> bool:
    """Not in a dry run, nor while a CUDA graph is captured: it replays work, not reads by the host."""
    return not loss.is_meta and not (loss.is_cuda and torch.cuda.is_current_stream_capturing())
