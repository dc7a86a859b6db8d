"""Numbers for the values of a dry run: every tensor's memory has one, and gets a new one when it is written to."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from convmesh.plans.fused.flow import NodeFlow, Role, Touch
from convmesh.private_torch.tensor_internals import storage_key
from convmesh.private_torch.tracing import is_cast

MOVES = frozenset(
    {
        "clone", "copy_", "copy", "cat", "stack", "constant_pad_nd", "expand", "repeat", "index", "index_select",
        "gather", "roll", "flip", "fill_", "zero_", "new_zeros", "new_ones", "new_full", "zeros", "ones", "full",
        "zeros_like", "ones_like", "full_like", "arange", "scalar_tensor", "slice_backward", "select_backward",
        "slice_scatter", "select_scatter", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
        "upsample_bilinear2d", "upsample_trilinear3d", "avg_pool2d", "avg_pool3d", "max_pool2d_with_indices",
        "_adaptive_avg_pool2d", "pixel_shuffle", "pixel_unshuffle", "reflection_pad2d", "replication_pad2d",
        "replication_pad3d", "embedding", "nll_loss_backward", "nll_loss2d_backward", "avg_pool2d_backward",
        "_adaptive_avg_pool2d_backward", "leaky_relu_backward", "hardtanh_backward", "hardswish_backward",
        "hardsigmoid_backward", "elu_backward", "softplus_backward", "mse_loss_backward", "bernoulli_",
    }
)  # fmt: skip
"""Operators that torch does not tag as pointwise, and whose results a compiler computes element by element."""

REDUCTIONS = frozenset(
    {
        "sum", "mean", "var_mean", "var", "amax", "amin", "all", "any", "prod", "max", "min", "argmax", "argmin",
        "logsumexp", "linalg_vector_norm", "_softmax", "_log_softmax", "_softmax_backward_data",
        "_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward", "native_group_norm",
        "native_group_norm_backward", "nll_loss_forward", "nll_loss2d_forward", "mse_loss", "l1_loss",
        "binary_cross_entropy_with_logits",
    }
)  # fmt: skip

LONGEST_ROW = 16384
"""Elements of a row that a kernel sums in one go."""


@cache
def role_of(func: Any) -> Role:
    """What a compiler does with an operator."""
    name = func.overloadpacket.__name__
    if name in REDUCTIONS:
        return "reduction"
    return "pointwise" if name in MOVES or is_cast(func) or torch.Tag.pointwise in func.tags else "extern"


class ValueFlow:
    """Notes what the computations of one recorded list of steps read and make."""

    def __init__(self, numbers: ValueNumbers) -> None:
        self._numbers = numbers
        self.touches: dict[int, Touch] = {}
        """By the place of the computation among the steps."""

    def note(self, place: int, func: Any, args: Any, given: Sequence[torch.Tensor], made: Sequence[Any]) -> None:
        reads = tuple([self._numbers.of(tensor) for tensor in given])
        writes = tuple([self._numbers.made(tensor) for tensor in made])
        dtypes = tuple([str(tensor.dtype).removeprefix("torch.") for tensor in (*given, *made)])
        role = role_of(func)
        in_rows = role == "reduction" and bool(given) and _is_in_rows(func.overloadpacket.__name__, args, given[0])
        moves = func.overloadpacket.__name__ in MOVES
        views = tuple([-1 if moves else int(tensor.storage_offset()) for tensor in given])
        self.touches[place] = Touch(role, reads, writes, dtypes, views, in_rows)


def _is_in_rows(name: str, args: Any, given: torch.Tensor) -> bool:
    """Whether a reduction's dims are the innermost ones in memory, and short."""
    if name.startswith("native_layer_norm"):
        return True
    dims = args[2] if name.endswith("_backward_data") else args[1] if len(args) > 1 else None
    dims = [dims] if type(dims) is int else dims
    if not isinstance(dims, (list, tuple)) or not dims or any(type(dim) is not int for dim in dims):
        return False
    summed = {dim % given.dim() for dim in dims} if given.dim() else set()
    inside = [given.stride(dim) for dim in summed if given.shape[dim] > 1]
    kept = [given.stride(dim) for dim in range(given.dim()) if dim not in summed and given.shape[dim] > 1]
    length = math.prod(given.shape[dim] for dim in summed)
    return length <= LONGEST_ROW and max(inside, default=0) < min(kept, default=1 << 62)


class ValueNumbers:
    """Numbers by memory. Freed memory may come back as another tensor's, under another number."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._count = 0

    def of(self, tensor: torch.Tensor) -> int:
        """The number of what a tensor's memory holds now."""
        storage = tensor.untyped_storage()
        known = self._alive.get(storage_key(storage))
        return known[1] if known is not None and known[0]() is not None else self._new(storage)

    def made(self, tensor: torch.Tensor) -> int:
        """A new number, for memory that was just written to."""
        return self._new(tensor.untyped_storage())

    def _new(self, storage: torch.UntypedStorage) -> int:
        self._count += 1
        self._alive[storage_key(storage)] = weakref.ref(storage), self._count
        return self._count


class FlowNotes:
    """The flow through a call, from its inputs to its outputs and back to their gradients."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._numbers = ValueNumbers()
        self._inputs = self._of(inputs)
        self.forward, self.backward = ValueFlow(self._numbers), ValueFlow(self._numbers)
        self._outputs: tuple[int | None, ...] = ()
        self._arriving: tuple[int | None, ...] = ()

    def turn(self, outputs: Sequence[torch.Tensor], ends: Sequence[torch.Tensor | None]) -> None:
        """Where forward ends, and backward begins."""
        self._outputs, self._arriving = self._of(outputs), self._of(ends)

    def flow(self, gradients: Sequence[torch.Tensor | None]) -> NodeFlow:
        return NodeFlow(
            self.forward.touches,
            self.backward.touches,
            self._inputs,
            self._outputs,
            self._arriving,
            self._of(gradients),
        )

    def _of(self, tensors: Sequence[torch.Tensor | None]) -> tuple[int | None, ...]:
        return tuple([None if tensor is None else self._numbers.of(tensor) for tensor in tensors])
