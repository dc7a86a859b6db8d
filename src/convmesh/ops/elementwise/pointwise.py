"""Operators that work on each index independently: nothing travels except to line up operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from convmesh.ops.core.broadcast import line_up
from convmesh.ops.core.probe import probe
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded
from convmesh.private_torch.tensor_internals import is_view

_T = torch.Tensor

UNARY: tuple[Callable[..., Any], ...] = (
    F.relu, torch.relu, _T.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.softplus,
    F.hardtanh, F.hardswish, F.hardsigmoid, F.hardshrink, F.softshrink, F.tanhshrink, F.softsign, F.logsigmoid,
    F.threshold, F.sigmoid, F.tanh, torch.sigmoid, _T.sigmoid, torch.tanh, _T.tanh, torch.exp, _T.exp, torch.log,
    _T.log, torch.log1p, _T.log1p, torch.sqrt, _T.sqrt, torch.rsqrt, _T.rsqrt, torch.abs, _T.abs, torch.neg, _T.neg,
    torch.sin, _T.sin, torch.cos, _T.cos, torch.erf, _T.erf, torch.square, _T.square, torch.reciprocal, _T.reciprocal,
    torch.sign, _T.sign, torch.floor, _T.floor, torch.ceil, _T.ceil, torch.round, _T.round, torch.clone, _T.clone,
    _T.contiguous, _T.float, _T.double, _T.half, _T.bfloat16, _T.long,
    _T.int, _T.bool, torch.zeros_like, torch.ones_like, torch.isnan, torch.isfinite,
    torch.logical_not, torch.expm1, _T.expm1, torch.log2, _T.log2, torch.log10, _T.log10, torch.tan, _T.tan, torch.atan,
    _T.atan, torch.asin, _T.asin, torch.acos, _T.acos, torch.sinh, _T.sinh, torch.cosh, _T.cosh, torch.asinh, _T.asinh,
    torch.erfc, _T.erfc, torch.trunc, _T.trunc, torch.frac, _T.frac, torch.nan_to_num, _T.nan_to_num, torch.isinf,
    _T.isinf, _T.isnan, _T.isfinite, torch.full_like, torch.empty_like, torch.bitwise_not, _T.logical_not,
    torch.deg2rad,
    torch.negative, _T.negative, torch.absolute, _T.absolute, torch.positive, torch.exp2, _T.exp2, torch.sinc,
)  # fmt: skip

BINARY: tuple[Callable[..., Any], ...] = (
    torch.add, _T.add, torch.sub, _T.sub, torch.mul, _T.mul, torch.div, _T.div, torch.pow, _T.pow, torch.maximum,
    torch.minimum, torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne, torch.logical_and, torch.logical_or,
    torch.atan2, torch.fmod, _T.maximum, _T.minimum, _T.lt, _T.le, _T.gt, _T.ge, _T.eq, _T.ne, _T.logical_and,
    _T.logical_or, torch.logical_xor, _T.logical_xor, _T.atan2, _T.fmod, torch.remainder, _T.remainder,
    torch.floor_divide, _T.floor_divide, torch.true_divide, _T.true_divide, torch.divide, _T.divide, torch.multiply,
    _T.multiply, torch.subtract, _T.subtract, torch.rsub, torch.hypot, _T.hypot, torch.logaddexp, _T.logaddexp,
    torch.bitwise_and, _T.bitwise_and, torch.bitwise_or, _T.bitwise_or, torch.bitwise_xor, _T.bitwise_xor, torch.xlogy,
    _T.xlogy, torch.float_power, torch.fmin, torch.fmax, torch.copysign, torch.greater, torch.less,
)  # fmt: skip

LINED_UP: tuple[Callable[..., Any], ...] = (
    *BINARY, torch.addcmul, _T.addcmul, torch.addcdiv, _T.addcdiv, torch.lerp, _T.lerp,
    torch.clamp, _T.clamp, torch.clip, _T.clip, torch.masked_fill, _T.masked_fill,
)  # fmt: skip
"""Functions of several tensors, or of numbers in place of some."""


def _register_unary(function: Callable[..., Any]) -> None:
    @implements(function)
    def split(x: Sharded, *args: Any, **kwargs: Any) -> Sharded:
        if kwargs.get("inplace"):
            # A shard may be a view returned by an exchange, which autograd does not let anyone overwrite.
            x.local = function(x.local, *args, **{**kwargs, "inplace": not is_view(x.local)})
            return x
        return x.like(function(x.local, *args, **kwargs))


def _register_lined_up(function: Callable[..., Any]) -> None:
    @implements(function)
    def split(*args: Any, **kwargs: Any) -> Sharded:
        operands, layout, mesh = line_up(*args, *kwargs.values())
        named = dict(zip(kwargs, operands[len(args) :], strict=True))
        return Sharded(function(*operands[: len(args)], **named), layout, mesh)


for _function in UNARY:
    _register_unary(_function)
for _function in LINED_UP:
    _register_lined_up(_function)


@implements(_T.where)
def where_method(x: Any, condition: Any, other: Any) -> Sharded:
    """`x` where a condition holds."""
    return where(condition, x, other)


@implements(torch.where)
def where(condition: Any, input: Any, other: Any) -> Sharded:  # noqa: A002 - torch's name
    """`torch.where` with all operands lined up; with a condition alone it would list places, which depends on data."""
    operands, layout, mesh = line_up(condition, input, other)
    return Sharded(torch.where(*operands), layout, mesh)


@implements(F.glu)
def glu(input: Any, dim: int = -1) -> Any:  # noqa: A002
    """One half of a dim, gated by the other."""
    values, gate = input.tensor_split(2, dim)
    F.glu(probe(input), dim)
    return values * gate.sigmoid()


@implements(F.cosine_similarity)
def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """The cosine of the angle between vectors along `dim`."""
    if x1.shape != x2.shape:
        x1, x2 = torch.broadcast_tensors(x1, x2)
    lengths = [torch.linalg.vector_norm(x, 2, dim, keepdim=True).clamp(min=eps) for x in (x1, x2)]
    return ((x1 / lengths[0]) * (x2 / lengths[1])).sum(dim)


@implements(F.prelu)
def prelu(x: Sharded, weight: torch.Tensor) -> Sharded:
    """PReLU as arithmetic, so that the weight's gradient is summed like any broadcast operand's."""
    slope = weight.view(-1, *([1] * (x.dim() - 2))) if weight.numel() > 1 else weight
    return where(x > 0, x, slope * x)
