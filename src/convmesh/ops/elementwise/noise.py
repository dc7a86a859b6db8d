"""Random numbers shaped like a sharded tensor: functions of a seed and the global index, the same on every mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from convmesh.dist import OpenMesh
from convmesh.errors import UnsupportedError
from convmesh.ops.core.mask_seeds import next_seed
from convmesh.ops.core.masks import random_bits
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded, replicated
from convmesh.private_torch import tree_leaves, tree_map

_T = torch.Tensor


def drawn(mesh: OpenMesh, call: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
    """A call that draws random numbers by global index, so that plain tensors get the same ones on every rank."""
    given = tree_leaves((args, kwargs))
    if any(isinstance(leaf, Sharded) for leaf in given):
        return call(*args, **(kwargs or {}))
    if not any(isinstance(leaf, torch.Tensor) for leaf in given):
        return _seeded(mesh, call, args, kwargs)
    on_mesh = tree_map(lambda x: replicated(x, mesh) if isinstance(x, torch.Tensor) else x, (args, kwargs or {}))
    result = call(*on_mesh[0], **on_mesh[1])
    if on_mesh[0] and result is on_mesh[0][0]:  # `x.bernoulli_()`
        return args[0].copy_(result.local)
    return tree_map(lambda x: x.local if isinstance(x, Sharded) else x, result)


def _seeded(mesh: OpenMesh, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`torch.rand(2, 3)` and similar calls: torch's numbers for a seed that all ranks share."""
    seed = next_seed(mesh)
    if not isinstance(seed, int):
        raise UnsupportedError(
            "a compiled step cannot draw a tensor of its own, such as torch.rand(2, 3); draw it like another one: "
            "torch.rand_like(x)."
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return call(*args, **(kwargs or {}))


def _uniform(x: Sharded, seed: int | torch.Tensor | None = None) -> torch.Tensor:
    """This rank's part of numbers strictly between 0 and 1."""
    bits = random_bits(x.box, x.shape, next_seed(x.mesh) if seed is None else seed, x.device)
    return bits.to(torch.float64).add_(2**31 + 0.5).mul_(2.0**-32)


def _normal(x: Sharded) -> torch.Tensor:
    """Box and Muller's transform of two uniform numbers."""
    seed = next_seed(x.mesh)
    radius = _uniform(x, seed).log_().mul_(-2).sqrt_()
    return radius.mul_(_uniform(x, seed + 1).mul_(2 * math.pi).cos_())


def _uniform_of(x: Sharded, dtype: torch.dtype) -> torch.Tensor:
    """Uniform numbers in [0, 1) with as many binary digits as a type has: none is rounded up to 1."""
    numbers = _uniform(x)
    if dtype == torch.float64:
        return numbers
    steps = 2 / torch.finfo(dtype).eps
    return numbers.mul_(steps).floor_().div_(steps).to(dtype)


@implements(torch.rand_like)
def rand_like(input: Sharded, *, dtype: torch.dtype | None = None, **options: Any) -> Sharded:  # noqa: A002 - torch's name
    """Uniform numbers in [0, 1)."""
    del options  # device and memory format are the shard's
    return input.like(_uniform_of(input, dtype or input.dtype))


@implements(torch.randn_like)
def randn_like(input: Sharded, *, dtype: torch.dtype | None = None, **options: Any) -> Sharded:  # noqa: A002
    """Normal numbers with mean 0 and variance 1."""
    del options
    return input.like(_normal(input).to(dtype or input.dtype))


@implements(torch.bernoulli, _T.bernoulli)
def bernoulli(input: Sharded, p: float | None = None) -> Sharded:  # noqa: A002
    """1 with the probability that each element gives, or with `p`; else 0. No gradient flows."""
    chance = input.local.detach() if p is None else p
    return input.like((_uniform(input) < chance).to(input.dtype))


@implements(_T.bernoulli_)
def bernoulli_in_place(input: Sharded, p: float = 0.5) -> Sharded:  # noqa: A002
    input.local = bernoulli(input, p).local
    return input


@implements(_T.uniform_)
def uniform_in_place(input: Sharded, a: float = 0.0, b: float = 1.0, **named: Any) -> Sharded:  # noqa: A002
    low, high = named.get("from", a), named.get("to", b)
    input.local = _uniform_of(input, input.dtype).mul_(high - low).add_(low)
    return input


@implements(_T.normal_)
def normal_in_place(input: Sharded, mean: float = 0.0, std: float = 1.0) -> Sharded:  # noqa: A002
    input.local = _normal(input).mul_(std).add_(mean).to(input.dtype)
    return input
