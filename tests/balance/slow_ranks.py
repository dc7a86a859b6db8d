"""A loss that takes a rank longer the more of the batch it has: what a slower machine is to a balancer."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from convmesh import Sharded

SECONDS_SAMPLE = 3e-3
"""For a rank of full speed; wall time, so that other processes on the machine matter little."""

SLOW = 1
"""The rank that takes three times as long."""


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def slowed_loss(output: Any, target: Any) -> torch.Tensor:
    """Cross entropy, after as much work as this rank's part of the batch asks for."""
    if isinstance(output, Sharded) and torch.is_grad_enabled() and dist.get_world_size() > 1:
        factor = 3 if dist.get_rank() == SLOW else 1
        share = output.box.size / output.numel()  # of samples, and of space
        spin(factor * SECONDS_SAMPLE * output.shape[0] * share)
    return cross_entropy(output, target)
