"""Fused kernels that are timed: the forms that compilers make of a network, over sizes and numbers of channels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from convmesh.plans import Work
from convmesh.plans.steps import Shape, bytes_of

Tensor = tuple[str, Shape]
"""Type and shape."""

IMAGES = (
    (64, 64, 112, 112), (64, 256, 56, 56), (64, 64, 56, 56), (64, 512, 28, 28), (64, 128, 28, 28), (64, 1024, 14, 14),
    (64, 256, 14, 14), (64, 2048, 7, 7), (64, 512, 7, 7), (32, 64, 7, 7),
)  # fmt: skip
VOLUMES = ((1, 32, 128, 128, 128), (1, 64, 64, 64, 64), (1, 128, 32, 32, 32), (1, 256, 16, 16, 16), (1, 320, 8, 8, 8))
ROWS = ((100352, 96), (25088, 192), (6272, 384), (1568, 768))


def fused_samples() -> list[Work]:
    """The largest first."""
    works = [*map(_normalising, (*IMAGES, *VOLUMES)), *map(_adding, IMAGES), *map(_activating_backward, IMAGES[::2])]
    works += [*map(_moments, (*IMAGES, *VOLUMES)), *map(_sums, (*IMAGES, *VOLUMES)), *map(_rows, ROWS)]
    works += map(_bias, (*IMAGES, *VOLUMES))
    return sorted(works, key=lambda work: -work.bytes_moved)


def _normalising(shape: Shape) -> Work:
    """x̂·w + b, through an activation."""
    return fused("pointwise", [_bf16(shape), *[_each_channel(shape)] * 4], [_bf16(shape)])


def _adding(shape: Shape) -> Work:
    """The same with a shortcut, and the sign of the result."""
    reads = [_bf16(shape), _bf16(shape), *[_each_channel(shape)] * 4]
    return fused("pointwise", reads, [_bf16(shape), ("bool", shape)])


def _activating_backward(shape: Shape) -> Work:
    reads = [_bf16(shape), _bf16(shape), ("bool", shape), *[_each_channel(shape)] * 5]
    return fused("pointwise", reads, [_bf16(shape)])


def _moments(shape: Shape) -> Work:
    return fused("moments", [_bf16(shape)], [_each_channel(shape)] * 2)


def _sums(shape: Shape) -> Work:
    """Of a norm's backward: gradient, activation and input."""
    reads = [_bf16(shape), _bf16(shape), _bf16(shape), *[_each_channel(shape)] * 2]
    return fused("sums", reads, [_each_channel(shape)] * 2)


def _bias(shape: Shape) -> Work:
    """Of a gradient alone."""
    return fused("sums", [_bf16(shape)], [_each_channel(shape)])


def _rows(shape: Shape) -> Work:
    return fused("rows", [_bf16(shape)], [_bf16(shape)])


def fused(form: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Work:
    """A kernel of a form."""
    shapes = [shape for _, shape in reads]
    moved = sum(bytes_of(shape, dtype) for dtype, shape in (*reads, *writes))
    call = f"fused_{form}.default({_written(reads)}, {_written(writes)})"
    results = tuple(shape for _, shape in writes)
    return Work(f"fused_{form}", tuple(shapes), results, reads[0][0], 0, moved, (), call)


def _written(tensors: Sequence[Tensor]) -> str:
    return f"({' '.join(f'{dtype}{_shape(shape)},' for dtype, shape in tensors)})"


def _shape(shape: Shape) -> str:
    inside = ", ".join(map(str, shape))
    return f"({inside}, last=1)" if len(shape) > 3 and math.prod(shape) > shape[1] else f"({inside})"


def _bf16(shape: Shape) -> Tensor:
    return "bfloat16", shape


def _each_channel(shape: Shape) -> Tensor:
    return "float32", (1, shape[1], *[1] * (len(shape) - 2))
