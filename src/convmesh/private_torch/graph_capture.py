"""Capturing CUDA graphs so that a failed capture leaves torch as it was: `torch.cuda.graph` alone does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what runs in here; other threads, such as NCCL's watchdog, may go on using the GPU.

    cuBLAS keeps 32 MiB for every stream on which a thread multiplies. Other streams' are freed before the capture, and
    the capture's own return to its pool afterwards, for later use.
    """
    before = torch.cuda.current_stream()
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            yield
    except BaseException:
        torch.cuda.set_stream(before)  # torch leaves the capturing stream only if the capture succeeds
        with suppress(Exception):  # otherwise the allocator would wait for its end for ever
            torch._C._cuda_endAllocateToPool(before.device_index, pool)
        raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()
