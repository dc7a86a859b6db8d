"""Losses with one value per element, and the reduction of all losses: a mean is over the whole global batch.

A reduced loss is the same on every rank; `loss.backward()` then gives the gradients of a single device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F

from convmesh.dist import OpenMesh, sum_over
from convmesh.errors import UnsupportedError
from convmesh.layout import Layout
from convmesh.ops.core.broadcast import line_up
from convmesh.ops.core.precision import wide
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded, replicated


def reduced(
    losses: torch.Tensor,
    layout: Layout,
    mesh: OpenMesh,
    reduction: str,
    divisor: torch.Tensor | None = None,
    poison: torch.Tensor | None = None,
) -> Sharded:
    """This rank's `losses`, laid out as `layout`: as they are, summed, or averaged over the global tensor.

    A mean divides by the sum of all ranks' `divisor`, or else by the number of losses. `poison` is added first: NaN
    if this rank's targets are wrong, so that every rank learns of it.
    """
    if reduction == "none":
        return Sharded(losses if poison is None else losses + poison, layout, mesh)
    total = losses.sum(dtype=wide(losses.dtype))
    total = total if poison is None else total + poison
    if reduction == "sum":
        total = sum_over(total, mesh, layout.axes)
    elif divisor is None:
        total = sum_over(total, mesh, layout.axes) / math.prod(layout.shape)
    else:
        pair = torch.stack([total, divisor.sum(dtype=total.dtype)])
        above, below = sum_over(pair, mesh, layout.axes).unbind()
        total = above / below
    return replicated(total.to(losses.dtype), mesh)


def check_reduction(name: str, reduction: str, legacy: Sequence[bool | None]) -> None:
    """Refuse unknown reductions, and torch's old `size_average` and `reduce`."""
    if reduction not in {"mean", "sum", "none"} or any(flag is not None for flag in legacy):
        raise UnsupportedError(
            f"`{name}` with reduction={reduction!r}, size_average={legacy[0]}, reduce={legacy[1]}: `reduction` must be "
            "'mean', 'sum' or 'none'; `size_average` and `reduce`, which torch deprecates, have no split version."
        )


def _register(function: Any) -> None:
    @implements(function)
    def split(
        x: Any,
        target: Any,
        reduction: str = "mean",
        size_average: bool | None = None,
        reduce: bool | None = None,
        **options: Any,
    ) -> Sharded:
        check_reduction(function.__name__, reduction, (size_average, reduce))
        if function is F.l1_loss:
            options["weight"] = _argument(function, "weight")
        tensors = {name: options.pop(name) for name in ("weight", "pos_weight") if options.get(name) is not None}
        _check_shapes(function, x, target, tensors.get("weight"))
        (local, goal, *others), layout, mesh = line_up(x, target, *tensors.values())
        factors = dict(zip(tensors, others, strict=True))
        losses = function(local, goal, reduction="none", **options, **factors)
        return reduced(losses, layout, mesh, reduction, factors.get("weight") if function in _WEIGHT_DIVIDES else None)


_BINARY = (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)

_WEIGHT_DIVIDES = (F.mse_loss, F.l1_loss)
"""With a weight, their mean is the weighted mean; the others' divides by the number of elements."""

for _function in (*_BINARY, F.huber_loss, F.smooth_l1_loss, *_WEIGHT_DIVIDES):
    _register(_function)


def _check_shapes(function: Any, x: Any, target: Any, weight: Any) -> None:
    """Torch's rules for targets and weights that must not broadcast, on global shapes, since shards may differ."""
    of_input = {"target": target} if function in _BINARY else {"weight": weight}
    for name, tensor in of_input.items():
        if tensor is not None and tensor.shape != x.shape:
            raise ValueError(
                f"`{function.__name__}`: `{name}` has shape {tuple(tensor.shape)}, but must have the input's shape, "
                f"{tuple(x.shape)}."
            )


def _argument(function: Any, name: str) -> Any:
    """An argument of the torch function whose split version is running: `l1_loss` does not pass its weight on."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(name)
