"""Operator calls as text, from which they can be repeated on tensors of the same shapes, types and formats."""

from __future__ import annotations

from typing import Any

import torch

from convmesh.kernels.memory_format import CHANNELS_LAST, is_channels_last, strides_of

_CONVOLUTIONS = frozenset(
    {torch.ops.aten.convolution, torch.ops.aten.mkldnn_convolution, torch.ops.aten.convolution_backward}
)


def in_kernel_format(func: Any, args: Any, result: Any) -> Any:
    """Results of convolutions without data: channels are innermost if input's or weight's are, as in cuDNN and oneDNN.

    The arriving gradient's format does not matter, as it is copied first; torch 2.11's meta kernels follow it.
    """
    if func.overloadpacket not in _CONVOLUTIONS:
        return result
    operands = args[1:3] if func.overloadpacket is torch.ops.aten.convolution_backward else args[:2]
    change = _with_last if any(is_channels_last(operand) for operand in operands) else _plain
    return tuple(map(change, result)) if isinstance(result, tuple) else change(result)


def _with_last(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor) or tensor.dim() not in CHANNELS_LAST:
        return tensor
    return torch.empty_like(tensor, memory_format=CHANNELS_LAST[tensor.dim()])


def _plain(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor) or not is_channels_last(tensor):
        return tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def written(func: Any, args: Any, kwargs: Any) -> str:
    """`relu.default(float32(8, 64, 32, 32, last=1))`: a Python expression whose tensors are calls of their types."""
    parts = [_written(arg) for arg in args]
    parts += [f"{name}={_written(value)}" for name, value in kwargs.items()]
    return f"{func.__name__}({', '.join(parts)})"


def _written(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, (list, tuple)):
        return f"({''.join([f'{_written(v)}, ' for v in value]).rstrip() if value else ''})"
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return "device"  # that of whoever repeats the call
    return repr(value) if isinstance(value, (bool, int, float, str)) else "None"


_texts: dict[Any, str] = {}
"""Texts of tensors, by type, shape and strides."""

MOST_TEXTS = 1 << 15


def _tensor(tensor: torch.Tensor) -> str:
    key = tensor.dtype, tensor.shape, tensor.stride()
    text = _texts.get(key)
    if text is None:
        if len(_texts) >= MOST_TEXTS:
            _texts.clear()
        text = _texts[key] = _described(tensor)
    return text


def _described(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    extents = ", ".join(map(str, tensor.shape))
    if tensor.is_contiguous():
        return f"{name}({extents})"
    return f"{name}({extents}, {'last=1' if is_channels_last(tensor) else f'strides={strides_of(tensor)}'})"
