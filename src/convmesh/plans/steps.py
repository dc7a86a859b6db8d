"""The steps of a program: local computations, transfers, waits, and the tensors that a node keeps or holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """One local computation: the operator, its local shapes, arithmetic and bytes."""

    op: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    dtype: str
    flops: int
    bytes_moved: int
    options: tuple[object, ...] = ()
    """The operator's other arguments: stride, padding, which gradients."""
    call: str = ""
    """The whole call, so that it can be replayed: `relu.default(float32(8, 64, 32, 32, last=1))`."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message to `peer`, or one collective over the ranks along `axes`, as this rank posts it."""

    carrier: str
    axes: tuple[str, ...]
    bytes_sent: int
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for transfers posted earlier in the same list of steps."""

    transfers: tuple[int, ...]
    """By their number among the list's transfers, from 0."""
    arriving: tuple[tuple[int, int], ...] = ()
    """Incoming messages: sender and bytes."""


Step = Work | Transfer | Wait
Steps = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor kept for backward: an input or output of the node (by index), a weight, or one of its own."""

    what: Literal["input", "output", "weight", "own"]
    index: int
    bytes_kept: int


@dataclass(frozen=True, slots=True)
class Held:
    """Memory that a node holds while it runs, and whose memory its outputs are in.

    An output is in the memory of an input, of another output (by index; its own index: its own memory) or of a weight.
    """

    bytes_forward: int = 0
    """Peak of forward, without its inputs."""
    bytes_backward: int = 0
    """Peak of backward, without kept tensors and output gradients."""
    bytes_weights: int = 0
    """The same, while weight gradients are computed separately."""
    outputs: tuple[Saved, ...] = ()
    gradients: tuple[Saved | None, ...] = ()
    """Whose memory the gradients of its inputs are in: that of an output's gradient, or of an input's."""


NOTHING_HELD = Held()


def bytes_each(dtype: str) -> int:
    """Bytes of one element; a type that is not listed counts as float32."""
    return _BYTES_EACH.get(dtype, 4)


def bytes_of(shape: Shape, dtype: str) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * bytes_each(dtype)


_BYTES_EACH = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
