"""A Gloo process group that uses another one's event loop.

torch gives every Gloo group its own device, whose thread wakes a hundred times a second even when nothing is sent. A
mesh of three axes opens seven groups, so these idle threads took a quarter of the time of ranks that share cores. torch
offers no public option for a group's devices, nor access to those of the job's group.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

THREADS = 2
"""As torch sets it for a group with one device."""


def gloo_group_like(parent: dist.ProcessGroup, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A Gloo backend over `store`, on the devices of `parent`'s."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = parent._get_backend(torch.device("cpu")).options._devices  # type: ignore[attr-defined]
    options._threads, options._timeout = THREADS, timeout
    return gloo(store, rank, size, options)
