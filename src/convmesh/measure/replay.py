"""Replays a program's operators on real tensors of the same shapes, number formats and memory formats."""

from __future__ import annotations

import ast
import math
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from convmesh.kernels.memory_format import CHANNELS_LAST
from convmesh.measure.fused_kernels import FORMS, fused_call

Call = Callable[[], object]

NOISE = 1 << 22
"""How many random numbers are drawn, once."""


class Replay:
    """Turns the text of a `Work`'s operator call into a call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def call(self, written: str) -> Call:
        """A call on fresh operands that does the same work every time."""
        expression = ast.parse(written, mode="eval").body
        assert isinstance(expression, ast.Call)
        assert isinstance(expression.func, ast.Attribute)
        assert isinstance(expression.func.value, ast.Name)
        name = expression.func.value.id
        args = [self._value(arg) for arg in expression.args]
        kwargs = {str(k.arg): self._value(k.value) for k in expression.keywords}
        if name in _SPECIAL:
            return _SPECIAL[name](*args, **kwargs)
        operator = getattr(getattr(torch.ops.aten, name), expression.func.attr)
        return lambda: operator(*args, **kwargs)

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Call):
            return self._tensor(node)
        if isinstance(node, ast.Tuple):
            return [self._value(part) for part in node.elts]
        if isinstance(node, ast.Name):
            return self._named(node.id)
        return ast.literal_eval(node)

    def _named(self, name: str) -> Any:
        if name in ("inf", "nan"):
            return float(name)
        return self._device if name == "device" else getattr(torch, name)

    def _tensor(self, node: ast.Call) -> torch.Tensor:
        assert isinstance(node.func, ast.Name)
        shape = [ast.literal_eval(arg) for arg in node.args]
        options = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
        tensor: torch.Tensor = _drawn(shape, getattr(torch, node.func.id), self._device, **options)
        return tensor


def _drawn(shape: list[int], dtype: torch.dtype, device: torch.device, last: int = 0, strides: Any = None) -> Any:
    if strides is None:
        order = CHANNELS_LAST[len(shape)] if last else torch.contiguous_format
        tensor = torch.empty(shape, dtype=dtype, device=device, memory_format=order)
    else:
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    steps = tensor.stride()
    count = 1 + sum((extent - 1) * step for extent, step in zip(shape, steps, strict=True)) if math.prod(shape) else 0
    flat = tensor.as_strided([count], [1])
    if dtype.is_floating_point:
        _fill(flat)
    elif dtype is torch.bool:
        flat.copy_(torch.rand(flat.shape, device=device) < 0.5)
    else:
        flat.random_(0, 2)  # also good as indices of classes
    return tensor


def _fill(flat: torch.Tensor) -> None:
    """Fill with noise from a random offset into numbers drawn once: drawing afresh would take longer than the timing.

    The noise must not repeat soon: a CPU's branch predictor learns thousands of decisions, and would find the maximum
    of repeating values in a third of the time.
    """
    noise = _noise(flat.device)
    begin = random.randrange(NOISE)
    for at in range(0, flat.numel(), NOISE):
        part = flat[at : at + NOISE]
        part.copy_(noise[begin : begin + part.numel()])


@cache
def _noise(device: torch.device) -> torch.Tensor:
    return torch.randn(NOISE, device=device).repeat(2)


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> Call:
    if not training:  # the runtime calls this kernel by name
        args = (x, weight, bias, mean, variance, training, momentum, eps)
        return lambda: torch.ops.aten.native_batch_norm(*args)
    variance = variance.abs_() if variance is not None else None
    enabled = torch.backends.cudnn.enabled  # on a GPU torch chooses between cuDNN's kernels and its own
    return lambda: torch.batch_norm(x, weight, bias, mean, variance, training, momentum, eps, enabled)


def _batch_norm_backward(grad: Any, x: Any, weight: Any, mean: Any, variance: Any, *saved: Any) -> Call:
    save_mean, save_scale, training, eps, mask = saved
    if not mask[0] or weight is None:  # the runtime calls this kernel by name
        args = (grad, x, weight, mean, variance, save_mean, save_scale, training, eps, mask)
        return lambda: torch.ops.aten.native_batch_norm_backward(*args)
    x.requires_grad_()
    weight.requires_grad_()
    bias = torch.zeros_like(weight).requires_grad_()
    with torch.enable_grad():
        y = torch.batch_norm(x, weight, bias, None, None, True, 0.1, eps, torch.backends.cudnn.enabled)
    return lambda: torch.autograd.grad(y, (x, weight, bias), grad, retain_graph=True)


def _max_pool_backward(name: str) -> Callable[..., Call]:
    """Indices must be those of maxima: random ones would scatter over memory, which real ones never do."""

    def make(grad: Any, x: Any, *args: Any) -> Call:
        *options, indices = args
        indices.copy_(getattr(torch.ops.aten, f"{name}_with_indices")(x, *options)[1])
        backward = getattr(torch.ops.aten, f"{name}_with_indices_backward")
        return lambda: backward(grad, x, *options, indices)

    return make


_SPECIAL: dict[str, Callable[..., Call]] = {
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "max_pool2d_with_indices_backward": _max_pool_backward("max_pool2d"),
    "max_pool3d_with_indices_backward": _max_pool_backward("max_pool3d"),
    **{form: fused_call(form) for form in FORMS},
}
