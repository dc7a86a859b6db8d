"""Dense layers over the last dim: `F.linear`, and `torch.matmul` with a matrix of weights.

The contracted dim must be whole: if it is cut, its axes are freed as for a reshape. Leading dims keep their cuts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from convmesh.dist import weights_over
from convmesh.errors import UnsupportedError
from convmesh.layout import Cut, Layout, Partition
from convmesh.layout.layout import LAYOUTS_KEPT
from convmesh.ops.channels.channel_layers import cut_linear, is_cut
from convmesh.ops.core.by_samples import by_samples, learns_partly
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.product.products import matrix_product
from convmesh.ops.shape.reshape import make_whole

Weight = torch.Tensor | Sharded

by_samples(F.linear, when=lambda x, weight, bias=None: len(x.layout.cuts) > 1 and learns_partly(x, weight, bias))


@implements(F.linear, takes_cut_weights=True)
def linear(input: Any, weight: Weight, bias: Weight | None = None) -> Sharded:  # noqa: A002
    """`x @ weight.T + bias` on the last dim."""
    x = _input("linear", input, weight, contracted=-1)
    if is_cut(weight):
        return cut_linear(x, weight, bias)  # type: ignore[arg-type]
    if isinstance(weight, Sharded) or isinstance(bias, Sharded):
        return _computed(x, weight, bias)
    return _dense(F.linear, x, weight.shape[0], weight, bias)


def _computed(x: Sharded, weight: Weight, bias: Weight | None) -> Sharded:
    """A dense layer whose weights the network computes from its input: their gradients are no sums of a reducer."""
    product = matrix_product(x, weight.t()) if isinstance(weight, Sharded) else matmul(x, weight.t())
    return product if bias is None else product + bias


@implements(torch.matmul, torch.Tensor.matmul, torch.mm, torch.Tensor.mm)
def matmul(input: Any, other: Any = None, mat2: Any = None) -> Sharded:  # noqa: A002
    """`x @ other`: with a matrix of weights as a dense layer, else as a product of activations."""
    other = mat2 if other is None else other  # the name that `torch.mm` gives it
    if not isinstance(input, Sharded) or isinstance(other, Sharded) or other.dim() != 2:
        return matrix_product(input, other)
    x = _input("matmul", input, other, contracted=0)
    return _dense(torch.matmul, x, other.shape[1], other)


@implements(torch.Tensor.__rmatmul__)
def right_matmul(other: torch.Tensor, input: Any) -> Sharded:  # noqa: A002
    """`x @ other`, which Python dispatches to the tensor on the right."""
    return matmul(input, other)


def _input(name: str, x: Any, weight: Weight, contracted: int) -> Sharded:
    """The input, after checking on every rank that the product exists."""
    if not isinstance(x, Sharded) or weight.dim() != 2:
        raise UnsupportedError(
            f"`{name}` of {_shape(x)} and {_shape(weight)}: the left operand must be a Sharded tensor and the right "
            "one a matrix of weights. For other products, gather the operands first with `x.gather()`."
        )
    if not x.dim() or x.shape[-1] != weight.shape[contracted]:
        raise ValueError(
            f"`{name}`: the last dim of the input, {_shape(x)}, must have the {weight.shape[contracted]} elements that "
            f"the weight, {_shape(weight)}, contracts."
        )
    return x


def _shape(x: Any) -> str:
    return f"{type(x).__name__}{tuple(x.shape)}"


@lru_cache(maxsize=LAYOUTS_KEPT)
def _with_features(layout: Layout, features: int) -> Layout:
    """The layout with an uncut last dim of `features` elements."""
    return layout.replacing({len(layout.cuts) - 1: Cut((), Partition.even(features, 1))})


def _dense(product: Callable[..., torch.Tensor], x: Sharded, features: int, *weights: torch.Tensor | None) -> Sharded:
    whole = make_whole(x, [x.dim() - 1])
    work = _with_features(whole.layout, features)
    return Sharded(product(whole.local, *weights_over(x.mesh, work.axes, *weights)), work, x.mesh)
