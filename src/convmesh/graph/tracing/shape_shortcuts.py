"""Results of the most common operators on tensors without data, where one argument alone determines them.

torch derives the shape, type and strides of any elementwise operator's result in Python, in up to a millisecond. If
the arguments have one type and one dense memory layout, the result has the same.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

_ELEMENTWISE = frozenset(
    {
        aten.relu.default, aten.gelu.default, aten.silu.default, aten.sigmoid.default, aten.tanh.default,
        aten.hardswish.default, aten.hardsigmoid.default, aten.leaky_relu.default, aten.elu.default,
        aten.threshold_backward.default, aten.gelu_backward.default, aten.silu_backward.default,
        aten.sigmoid_backward.default, aten.tanh_backward.default, aten.hardswish_backward.default,
        aten.leaky_relu_backward.default, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar,
        aten.clamp.default,
    }
)  # fmt: skip

_COMPARED = frozenset({aten.le.Scalar, aten.lt.Scalar, aten.ge.Scalar, aten.gt.Scalar})

_SPREAD = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.where.self})
"""Operators that repeat the smaller argument."""

_SOFTMAX = frozenset({aten._safe_softmax.default, aten._softmax_backward_data.default})

_IN_PLACE = frozenset(
    {
        aten.mul_.Tensor, aten.add_.Tensor, aten.sub_.Tensor, aten.div_.Tensor, aten.addcmul_.default,
        aten.clamp_.default, aten.rsqrt_.default,
    }
)  # fmt: skip

_RESIZED = frozenset(
    {
        aten.upsample_linear1d.default, aten.upsample_bilinear2d.default, aten.upsample_trilinear3d.default,
        aten.upsample_bicubic2d.default,
    }
)  # fmt: skip
"""Interpolations that torch, without data, writes out in Python coefficient by coefficient."""

_TYPES = (torch.float32, torch.float64)
"""Types whose statistics torch keeps in the type itself."""


def made(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a call."""
    if func in _IN_PLACE and _fit(args):
        return args[0]
    if func in _ELEMENTWISE and not kwargs:
        tensors = _tensors(args)
        if _lie_alike(tensors):
            return _like(tensors[0])
        if _lie_in_order(tensors):
            return _plain(tensors[0], tensors[0].shape)
    if func in _COMPARED and _lie_alike(args[:1]):
        return _like(args[0], torch.bool)
    if func in _SPREAD and not kwargs and (whole := _spread_over(args)) is not None:
        return _plain(whole, whole.shape)
    if func in _SOFTMAX and not kwargs and _keeps_plain(args):
        return _plain(args[0], args[0].shape)
    if func is aten.addmm.default and not kwargs and _multiply(*args):
        return _plain(args[0], (args[1].shape[0], args[2].shape[1]))
    if func is aten.native_layer_norm.default and _are_rows(args[:1], args[1]) and _lie_alike(args[:1]):
        return _like(args[0]), *(_plain(args[0], _statistics_of_rows(*args[:2])) for _ in range(2))
    if func is aten.native_layer_norm_backward.default and _are_rows(args[:2], args[2]) and all(args[7]):
        return _like(args[1]), *(_plain(args[1], args[2]) for _ in range(2))
    if func is aten.native_batch_norm.default and _lie_alike(args[:1]) and (args[5] or _are_given(args[3:5])):
        return _like(args[0]), *_statistics(args[0], (True, True))
    if func is aten.native_batch_norm_backward.default and _lie_alike(args[:2]) and args[7]:
        return _like(args[1]), *_statistics(args[1], args[9][1:])
    if func is aten.native_batch_norm_backward.default and args[2] is None and args[5] is not None:
        return _with_types_of(args[5], func(*args, **kwargs))
    if func is aten.convolution_backward.default and _are_plain(args[:3]):
        shapes = (args[1].shape, args[2].shape, args[3])
        return tuple(_plain(args[0], s) if is_wanted else None for s, is_wanted in zip(shapes, args[10], strict=True))
    if func is aten.convolution.default and _are_plain(args[:2]) and (shape := _convolved(*args)):
        return _plain(args[0], shape)
    if func is aten.cat.default and len(args) == 2 and (shape := _joined(*args)):
        return _plain(args[0][0], shape)
    if func in _RESIZED and _are_plain(args[:1]) and (shape := _resized(*args[:2])):
        return _plain(args[0], shape)
    return func(*args, **kwargs)


def _spread_over(operands: Any) -> Any:
    """The tensor over which the others are repeated, with more than one index in every dim; None in other cases.

    A condition may have a different type from the values; all are contiguous, so they agree on the result's layout.
    """
    tensors = _tensors(operands)
    whole = max(tensors, key=lambda t: (t.dim(), t.numel(), t.dtype in _TYPES))
    fits = whole.dtype in _TYPES and len(tensors) == len(operands) and min(whole.shape, default=0) > 1
    return whole if fits and all(_repeats(t, whole) for t in tensors) else None


def _repeats(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    pairs = zip(reversed(tensor.shape), reversed(whole.shape), strict=False)
    is_like = tensor.is_meta and tensor.dtype in (whole.dtype, torch.bool) and _is_plain(tensor)
    return is_like and all(extent in (1, target) for extent, target in pairs)


def _keeps_plain(args: Any) -> bool:
    """Whether a softmax or its gradient has the shape and type of its arguments, which are contiguous."""
    tensors, options = _tensors(args), [value for value in args if not isinstance(value, (torch.Tensor, int))]
    first = tensors[0]
    return all(option in (None, first.dtype) for option in options) and all(
        t.is_meta and t.dtype == first.dtype and first.dtype in _TYPES and t.shape == first.shape and _is_plain(t)
        for t in tensors
    )


def _multiply(bias: Any, one: Any, other: Any) -> bool:
    """Whether two matrices of more than one row and column multiply, and a vector is added to every row."""
    shape = (*one.shape[:1], *other.shape[1:])
    fits = one.shape[1:] == other.shape[:1] and tuple(bias.shape) == shape[1:]
    return fits and min(shape) > 1 and all(t.is_meta and t.dtype in _TYPES for t in (bias, one, other))


def _are_rows(tensors: Any, normalised: Any) -> bool:
    """Whether tensors are contiguous rows that a layer norm normalises one by one."""
    first = tensors[0]
    rows = first.shape[: first.dim() - len(normalised)]
    is_whole = [*first.shape[len(rows) :]] == [*normalised] and len(rows) > 0 and min(first.shape) > 1
    return is_whole and all(
        t.is_meta and t.dtype in _TYPES and t.dtype == first.dtype and t.shape == first.shape and _is_plain(t)
        for t in tensors
    )


def _statistics_of_rows(x: Any, normalised: Any) -> tuple[int, ...]:
    return (*x.shape[: x.dim() - len(normalised)], *(1 for _ in normalised))


def _with_types_of(mean: torch.Tensor, gradients: Any) -> tuple[Any, ...]:
    """Gradients of a norm's weights in the type of its statistics, as kernels return them; torch says the values'."""
    of_values, *of_weights = gradients
    return of_values, *(None if g is None else torch.empty_like(g, dtype=mean.dtype) for g in of_weights)


def _resized(x: Any, extents: Any) -> tuple[int, ...] | None:
    """The shape of an interpolation; None if torch might refuse it, or take the result for channels-last."""
    shape = (*x.shape[:2], *extents)
    return shape if len(shape) == x.dim() and min(shape) > 1 and 1 not in x.shape else None


def _are_given(tensors: Any) -> bool:
    return not any(t is None for t in tensors)  # `in` would compare values


def _fit(operands: Any) -> bool:
    """Whether the first tensor can hold the result: the other operands are tensors of its shape, or numbers."""
    tensors = _tensors(operands)
    shape = operands[0].shape
    return all(t.is_meta and t.dtype in _TYPES and t.shape == shape for t in tensors)


def _are_plain(tensors: Any) -> bool:
    """Whether tensors are contiguous, of one type, and have dims of space, as torch's own shape functions require."""
    first = tensors[0]
    return all(t.is_meta and t.dtype == first.dtype and t.dim() > 2 and _is_plain(t) for t in tensors)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous, with the usual strides even in dims of one index."""
    size = 1
    for extent, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != size:
            return False
        size *= extent
    return size > 0


def _convolved(x: Any, weight: Any, bias: Any, *options: Any) -> tuple[int, ...] | None:
    """The shape of a convolution; None if torch might refuse it, or spread its options over dims."""
    del bias
    stride, padding, dilation, transposed, _, groups = options
    dims = x.dim() - 2
    if transposed or x.shape[1] != weight.shape[1] * groups or {len(stride), len(padding), len(dilation)} != {dims}:
        return None
    each = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    space = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in each]
    return (x.shape[0], weight.shape[0], *space) if min(space) > 0 else None


def _joined(tensors: Any, dim: int) -> tuple[int, ...] | None:
    """The shape of joined tensors; None if they do not fit or are not contiguous."""
    if not _are_plain(tensors) or dim < 0 or any(1 in t.shape for t in tensors):
        return None
    first = tuple(tensors[0].shape)
    if any((*t.shape[:dim], *t.shape[dim + 1 :]) != (*first[:dim], *first[dim + 1 :]) for t in tensors):
        return None
    return (*first[:dim], sum(t.shape[dim] for t in tensors), *first[dim + 1 :])


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _lie_alike(tensors: Any) -> bool:
    """Whether tensors have the same shape, type and dense memory layout."""
    first = tensors[0]
    if not first.is_meta or first.dtype not in _TYPES or 0 in first.shape or not _is_settled(first):
        return False
    return all(
        t.is_meta and t.dtype == first.dtype and t.shape == first.shape and t.stride() == first.stride()
        for t in tensors[1:]
    )


def _lie_in_order(tensors: Any) -> bool:
    """Whether tensors of one shape and type have descending strides, with gaps or without."""
    first = tensors[0]
    if first.dtype not in _TYPES or min(first.shape, default=0) < 2:
        return False
    return all(t.is_meta and t.dtype == first.dtype and t.shape == first.shape and _is_nested(t) for t in tensors)


def _is_nested(tensor: torch.Tensor) -> bool:
    strides = tensor.stride()
    pairs = zip(strides, strides[1:], tensor.shape[1:], strict=False)
    return strides[-1] > 0 and all(outer >= inner * extent for outer, inner, extent in pairs)


def _is_settled(tensor: torch.Tensor) -> bool:
    """Whether torch would keep these strides: it changes those of dims of one index unless the tensor is contiguous."""
    if 1 in tensor.shape:
        return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()
    return bool(aten.is_non_overlapping_and_dense(tensor))


def _plain(like: torch.Tensor, shape: Any) -> torch.Tensor:
    """A tensor of another shape. Not by `new_empty`, which torch implements in Python."""
    return torch.empty(shape, dtype=like.dtype, device="meta")


def _like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta")


def _statistics(x: torch.Tensor, wanted: Any) -> list[torch.Tensor | None]:
    return [_plain(x, x.shape[1:2]) if is_wanted else None for is_wanted in wanted]
