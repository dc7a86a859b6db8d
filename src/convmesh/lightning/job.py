"""The ranks of a trainer: joining them, the same random numbers on all, and sums over them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from convmesh.dist import init
from convmesh.private_torch import tree_leaves


def joined(environment: Any, device: torch.device, seconds_timeout: float) -> None:
    """Open the process group of Lightning's environment."""
    place = {
        "RANK": environment.global_rank(),
        "WORLD_SIZE": environment.world_size(),
        "LOCAL_RANK": environment.local_rank(),
        "MASTER_ADDR": environment.main_address,
        "MASTER_PORT": environment.main_port,
    }
    with _variables({name: str(value) for name, value in place.items()}):
        init(seconds_timeout, backend="gloo" if device.type == "cpu" else "nccl")


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables temporarily: Lightning reads some of them to learn who started it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def same_random_numbers() -> None:
    """Give all ranks the first one's generators, so that they shuffle and augment alike."""
    states: list[Any] = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(states, src=0)
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def batch_words(batch: Any) -> str:
    """What ranks compare about a batch: the shape and the sum of each tensor in it."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return ", ".join(f"{tuple(t.shape)} with sum {t.double().sum().item():.9g}" for t in tensors)


_OPERATORS = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduced(value: Any, group: Any, operator: Any) -> Any:
    """The mean of a tensor over ranks, or its largest or smallest value; anything else unchanged."""
    if not isinstance(value, torch.Tensor) or dist.get_world_size() == 1:
        return value
    name = str(operator).lower().rpartition(".")[2]
    if name not in _OPERATORS and not value.is_floating_point():
        return value  # a count: the same on every rank
    summed = value.detach().clone().contiguous()
    dist.all_reduce(summed, _OPERATORS.get(name, dist.ReduceOp.SUM), group=group)
    return summed if name in _OPERATORS else summed / dist.get_world_size(group)
