"""A point that no rank of a group passes before all have reached it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def wait_for_all(group: Any = None) -> None:
    """Wait for all ranks of `group` (default: the job's)."""
    # Unless told the device, torch warns on NCCL, on the first rank only: with warnings as errors that rank raises, and
    # the others wait for it.
    devices = [torch.cuda.current_device()] if dist.get_backend(group) == "nccl" else None
    dist.barrier(group, device_ids=devices)
