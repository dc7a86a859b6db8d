"""Dropout whose masks depend only on a seed and the global index, so they are the same on every mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from convmesh.dist import OpenMesh
from convmesh.errors import UnsupportedError
from convmesh.layout import Box
from convmesh.ops.core.mask_seeds import next_seed
from convmesh.ops.core.masks import keep_mask
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded

ALPHA = 1.7580993408473766
"""The limit of SELU at −∞, negated: alpha dropout replaces dropped elements by its negative."""

Fill = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Maps local values, mask and probability to the local result."""


def manual_seed(mesh: OpenMesh, seed: int) -> None:
    """Restart the masks, e.g. for each run; give every rank the same seed."""
    mesh.seeds.manual_seed(seed)


@implements(F.dropout)
def dropout(x: Sharded, p: float = 0.5, training: bool = True, inplace: bool = False) -> Sharded:
    """Zero each element with probability `p`, scale the others by `1 / (1 - p)`."""
    return _drop(x, x.dim(), _zeroed, p, training, inplace)


@implements(F.alpha_dropout)
def alpha_dropout(x: Sharded, p: float = 0.5, training: bool = False, inplace: bool = False) -> Sharded:
    """Dropout that keeps mean and variance of SELU activations."""
    return _drop(x, x.dim(), _saturated, p, training, inplace)


@implements(F.feature_alpha_dropout)
def feature_alpha_dropout(x: Sharded, p: float = 0.5, training: bool = False, inplace: bool = False) -> Sharded:
    """Alpha dropout of whole channels."""
    return _drop(x, 2, _saturated, p, training, inplace)


def _register_channelwise(function: Callable[..., Any], dims: int) -> None:
    @implements(function)
    def split(x: Sharded, p: float = 0.5, training: bool = True, inplace: bool = False) -> Sharded:
        if x.dim() != dims:
            raise UnsupportedError(
                f"`input` of {function.__name__} has shape {tuple(x.shape)}, but its split version takes samples, "
                f"channels and {dims - 2} spatial dims; use the dropout function for {x.dim() - 2} spatial dims."
            )
        return _drop(x, 2, _zeroed, p, training, inplace)


for _dims, _function in ((3, F.dropout1d), (4, F.dropout2d), (5, F.dropout3d)):
    _register_channelwise(_function, _dims)


def _drop(x: Sharded, masked_dims: int, fill: Fill, p: float, training: bool, inplace: bool) -> Sharded:
    """Draw a mask over the first `masked_dims` dims and apply it."""
    if not 0 <= p <= 1:
        raise ValueError(f"`p` (={p}) must be a probability, between 0 and 1.")
    if not training or p == 0:
        return x
    local = x.local * 0 if p == 1 else fill(x.local, _draw(x, masked_dims, p), p)
    if not inplace:
        return x.like(local)
    # In place for its owner: `x` gets a new tensor. Its old memory may belong to another one too, so it is left alone.
    x.local = local
    return x


def _draw(x: Sharded, masked_dims: int, p: float) -> torch.Tensor:
    """This rank's part of the next mask, ready to broadcast."""
    seed = next_seed(x.mesh)
    box = Box(x.box.spans[:masked_dims])
    mask = keep_mask(box, x.shape[:masked_dims], seed, p, x.device)
    if masked_dims < x.dim():
        return mask.view(*box.shape, *[1] * (x.dim() - masked_dims))
    return mask if x.local.is_contiguous() else torch.empty_like(x.local, dtype=torch.bool).copy_(mask)


def _zeroed(local: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    return (local * mask).mul_(1 / (1 - p))


def _saturated(local: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    scale = 1 / math.sqrt((1 - p) * (1 + p * ALPHA**2))
    return torch.where(mask, local, -ALPHA).mul_(scale).add_(scale * ALPHA * p)
