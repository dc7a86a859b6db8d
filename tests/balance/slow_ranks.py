"""A loss that takes a rank longer the more of the batch it has: what a slower machine is to a balancer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from convmesh import Sharded
from convmesh.dist.stamps import HostClock
from tests.train.runs import ran

SECONDS_SAMPLE = 3e-3
"""For a rank of full speed, of its own thread: others on the machine do not count."""

SLOW = 1
"""The rank that takes three times as long."""


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class ThreadClock(HostClock):
    """What this rank computes, as if it had a core of its own."""

    stamp = staticmethod(time.thread_time)


@contextmanager
def cores_of_their_own() -> Iterator[None]:
    """On a rank: balancers do not see that a busy machine holds it up, which would be measured for what it is."""
    with patch("convmesh.balance.balancer.clock_for", lambda _: ThreadClock()):
        yield


def ran_alone(tables: dict[str, Any], folder: str, resume: bool = False) -> dict[str, Any]:
    """On a rank: the summary of a run."""
    with cores_of_their_own():
        return ran(tables, folder, resume)


def slowed_loss(output: Any, target: Any) -> torch.Tensor:
    """Cross entropy, after as much work as this rank's part of the batch asks for."""
    if isinstance(output, Sharded) and torch.is_grad_enabled() and dist.get_world_size() > 1:
        factor = 3 if dist.get_rank() == SLOW else 1
        share = output.box.size / output.numel()  # of samples, and of space
        spin(factor * SECONDS_SAMPLE * output.shape[0] * share)
    return cross_entropy(output, target)
