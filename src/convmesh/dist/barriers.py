"""A point that no rank of a group passes before all have come to it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def wait_for_all(group: Any = None) -> None:
    """Wait for all ranks of `group` (default: of the job)."""
    # Unless told the device, torch warns on NCCL, and on the first rank alone: with warnings as errors that one raises,
    # and the others wait for it.
    devices = [torch.cuda.current_device()] if dist.get_backend(group) == "nccl" else None
    dist.barrier(group, device_ids=devices)
