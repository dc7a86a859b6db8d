"""Aten calls as the torch functions that a model would have called, since those have split versions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class Call(NamedTuple):
    """A call of a function, or of a tensor method if `function` is a name."""

    function: Callable[..., Any] | str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


SKIPPED = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")
"""Checks that export adds."""

_METHOD_NAMES = "view reshape permute transpose squeeze unsqueeze expand contiguous clone to select flatten chunk split"
_METHODS = frozenset(_METHOD_NAMES.split())
_FUNCTIONS = "dropout alpha_dropout feature_dropout relu relu6 leaky_relu elu selu celu silu mish hardtanh hardswish"
_FUNCTIONS += " hardsigmoid gelu softplus max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d pad linear"
_FUNCTIONS += " adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d layer_norm"
_BY_NAME = {name: getattr(F, name) for name in _FUNCTIONS.split() if hasattr(F, name)}
_IN_PLACE = {"add_": operator.iadd, "sub_": operator.isub, "mul_": operator.imul, "div_": operator.itruediv}
"""What `x += y` and its like become; `add_` with `alpha` stays a method."""


def torch_call(packet: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    """The torch function for the aten operator `packet`; None if there is none."""
    if packet in _REORDERED:
        return _REORDERED[packet](tuple(args), kwargs)
    if packet.startswith("upsample_"):
        return _interpolate(packet, args)
    if packet in _IN_PLACE and not kwargs:
        return Call(_IN_PLACE[packet], tuple(args), {})
    if packet in _METHODS or packet.endswith("_"):
        return Call(packet, tuple(args), kwargs)
    function = _BY_NAME.get(packet) or getattr(torch, packet, None)
    return Call(function, tuple(args), kwargs) if function is not None else None


def _batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    x, weight, bias, mean, var, training, momentum, eps = args[:8]
    return Call(F.batch_norm, (x, mean, var, weight, bias, training, momentum, eps), kwargs)


def _instance_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    x, weight, bias, mean, var, use_input_stats, momentum, eps = args[:8]
    return Call(F.instance_norm, (x, mean, var, weight, bias, use_input_stats, momentum, eps), kwargs)


def _group_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return Call(F.group_norm, args[:5], {name: value for name, value in kwargs.items() if name != "cudnn_enabled"})


def _slice(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    given: list[Any] = [*args, *[None, 0, None, None, None][len(args) :]]
    x, dim, start, end, step = given
    end = None if isinstance(end, int) and end >= 2**62 else end
    return Call(operator.getitem, (x, (*(slice(None),) * dim, slice(start, end, step))), kwargs)


def _size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return Call("size", args, kwargs)


def _softmax(function: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], Call]:
    def convert(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
        return Call(function, args[:2], {} if dtype is None else {"dtype": dtype})

    return convert


def _interpolate(packet: str, args: Sequence[Any]) -> Call | None:
    """`upsample_bilinear2d.vec(x, size, align_corners, scales)`; nearest ones have no corners."""
    mode = packet.removeprefix("upsample_").rstrip("123d")
    if mode not in ("nearest", "linear", "bilinear", "bicubic", "trilinear"):
        return None
    x, size, *rest = args
    corners = rest.pop(0) if mode != "nearest" else None
    scales = rest[0] if rest else None
    return Call(F.interpolate, (x,), {"size": size, "scale_factor": scales, "mode": mode, "align_corners": corners})


_REORDERED: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], Call]] = {
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "slice": _slice,
    "sym_size": _size,
    "softmax": _softmax(torch.softmax),
    "log_softmax": _softmax(torch.log_softmax),
}
