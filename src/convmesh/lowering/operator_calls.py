"""Operators on tensors without data: the work that each call stands for, and its results.

Both follow from the shapes, strides and types of the arguments, so a call like an earlier one is replayed: torch takes
fifty times as long to derive the shapes of a convolution's gradients as to make tensors of known shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from convmesh.graph.tracing.shape_shortcuts import made
from convmesh.lowering.call_text import in_kernel_format, written
from convmesh.plans import Work
from convmesh.private_torch.attention_kernels import COUNTED_AS, skips_half
from convmesh.private_torch.fourier_kernels import FOURIER_KERNELS
from convmesh.private_torch.tensor_internals import memory_key, storage_key

ALIASING = frozenset({"detach", "_unsafe_view", "lift_fresh", "as_strided_"})
"""Operators whose result shares their argument's memory, although torch does not call them views."""

FREE = ALIASING | {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Operators that touch no memory."""

MOST_CALLS = 1 << 15
"""Different calls kept; a search for one network makes a few thousand."""

_PRODUCTS = {torch.ops.aten.mm: 0, torch.ops.aten.bmm: 0, torch.ops.aten.addmm: 1, torch.ops.aten.baddbmm: 1}
"""Matrix products, and which of their arguments is the left factor."""

_TORCH_COUNTS = re.compile("attention|conv|scaled_mm")
"""Names of the other operators whose FLOPs torch counts."""

Signature = tuple[Any, ...]


class _Fresh(NamedTuple):
    """A result in its own memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")

    @property
    def bytes_needed(self) -> int:
        """Bytes of a storage that begins and ends with it."""
        if 0 in self.shape:
            return 0
        last = sum([(extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True)])
        return (last + 1) * self.dtype.itemsize


class _Given(NamedTuple):
    """A result that is one of the call's own tensors, as in-place operators return."""

    position: int


class _CallReplay(NamedTuple):
    """What a call does and returns."""

    work: Work | None
    results: tuple[Any, ...]
    """`_Fresh` and `_Given` in place of tensors."""
    container: type | None
    """The type of sequence that holds several results."""


_known: dict[Signature, _CallReplay | None] = {}
"""None marks calls that have to be made each time: their results share memory with their arguments."""


_views: dict[int, tuple[Any, bool]] = {}
"""By the id of an operator, which is kept alive here: torch's hash of one is a slow Python function."""


def is_view(func: Any) -> bool:
    """Whether an operator only gives its argument's memory another shape."""
    known = _views.get(id(func))
    if known is None:
        known = _views[id(func)] = func, func.is_view or func.overloadpacket.__name__ in ALIASING
    return known[1]


def run_call(func: Any, args: Any, kwargs: Any) -> tuple[Any, Work | None]:
    """The result of an operator that is no view, and its work unless it is free."""
    try:
        signature = _signature(func, args, kwargs)
        replay = _known.get(signature)
    except TypeError:  # a tensor has data, or an argument cannot be compared
        return made_call(func, args, kwargs)
    if replay is not None:
        return _replayed(replay, args, kwargs), replay.work
    result, work = made_call(func, args, kwargs)
    if signature not in _known:
        if len(_known) >= MOST_CALLS:
            _known.clear()
        # An operator that works in place may have changed the shape of an argument.
        is_same = not func.overloadpacket.__name__.endswith("_") or _signature(func, args, kwargs) == signature
        _known[signature] = _replay_of(result, work, tensors_in((*args, *kwargs.values()))) if is_same else None
    return result, work


def made_call(func: Any, args: Any, kwargs: Any) -> tuple[Any, Work | None]:
    """The same, without consulting earlier calls."""
    result = result_of(func, args, kwargs)
    is_free = func.is_view or func.overloadpacket.__name__ in FREE
    return result, None if is_free else _work(func, args, kwargs, result)


def result_of(func: Any, args: Any, kwargs: Any) -> Any:
    """The result alone."""
    return in_kernel_format(func, args, made(func, args, kwargs))


def _signature(func: Any, args: Any, kwargs: Any) -> Signature:
    """Everything that the results depend on; operators live as long as the process, so their ids suffice."""
    return id(func), torch.get_default_dtype(), _described(args), _described(kwargs.items()) if kwargs else None


_SIMPLE = frozenset({int, bool, float, type(None)})


def _described(values: Any) -> tuple[Any, ...]:
    """Numbers come with their types: 1, 1.0 and True are equal, but not alike to an operator."""
    described: list[Any] = []
    for value in values:
        kind = value.__class__
        if kind in _SIMPLE:
            described.append((kind, value))
        elif isinstance(value, torch.Tensor):
            if not value.is_meta:
                raise TypeError("a tensor has data")
            described.append((value.dtype, value.shape, value.stride()))
        elif isinstance(value, (list, tuple)):
            described.append(_described(value))
        else:
            described.append((kind, value))
    return tuple(described)


def _replay_of(result: Any, work: Work | None, given: Sequence[torch.Tensor]) -> _CallReplay | None:
    several = isinstance(result, (list, tuple))
    listed = tuple(result) if several else (result,)
    storages = {memory_key(tensor) for tensor in given}
    results: list[Any] = []
    for value in listed:
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (list, tuple)):
                return None
            results.append(value)
            continue
        index = next((index for index, tensor in enumerate(given) if tensor is value), None)
        if index is not None:
            results.append(_Given(index))
            continue
        if not value.is_meta:
            return None  # a number that all ranks draw: it has a value even in a dry run
        fresh = _Fresh(tuple(value.shape), value.stride(), value.dtype)
        storage = value.untyped_storage()
        if storage_key(storage) in storages or storage.nbytes() != fresh.bytes_needed:
            return None
        storages.add(storage_key(storage))
        results.append(fresh)
    return _CallReplay(work, tuple(results), type(result) if several else None)


def _replayed(replay: _CallReplay, args: Any, kwargs: Any) -> Any:
    if replay.container is None:
        return _result(replay.results[0], args, kwargs)
    return replay.container([_result(value, args, kwargs) for value in replay.results])


def _result(value: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(value, _Fresh):
        return value.make()
    if isinstance(value, _Given):
        return tensors_in((*args, *kwargs.values()))[value.position]
    return value


def _work(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    values = (*args, *kwargs.values())
    inputs = tensors_in(values)
    outputs = tensors_in(result if isinstance(result, (list, tuple)) else (result,))
    tensors = inputs + outputs
    return Work(
        op=func.overloadpacket.__name__,
        inputs=tuple([tuple(t.shape) for t in inputs]),
        outputs=tuple([tuple(t.shape) for t in outputs]),
        dtype=dtype_name(tensors[0].dtype) if tensors else "",
        flops=_flops(func, args, kwargs, result),
        bytes_moved=sum([t.numel() * t.element_size() for t in tensors]),
        options=tuple([tuple(v) if isinstance(v, list) else v for v in values if not _holds_tensors(v)]),
        call=written(func, args, kwargs),
    )


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    if func.overloadpacket is torch.ops.aten.convolution_backward:
        return _backward_flops(*args)
    if func.overloadpacket in (torch.ops.aten.mkldnn_convolution, torch.ops.aten.convolution):
        is_transposed = func.overloadpacket is torch.ops.aten.convolution and args[6]
        places = args[0] if is_transposed else result
        return 2 * int(places.numel()) * int(args[1][0].numel())  # torch's count takes fifty times as long
    if func.overloadpacket in FOURIER_KERNELS:
        return _fourier_flops(args[0], args[1], result)
    if func.overloadpacket in _PRODUCTS:
        return 2 * int(result.numel()) * int(args[_PRODUCTS[func.overloadpacket]].shape[-1])
    return _torch_flops(func, args, kwargs, result) if _TORCH_COUNTS.search(func.overloadpacket.__name__) else 0


def _torch_flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """As torch counts: for attention, and convolutions by their other names."""
    from torch.utils.flop_counter import flop_registry  # which imports all of Triton

    count = flop_registry.get(COUNTED_AS.get(func.overloadpacket, func.overloadpacket))
    if count is None:
        return 0
    return int(count(*args, **kwargs, out_val=result)) // (2 if skips_half(func, args, kwargs) else 1)


def _fourier_flops(x: Any, dims: Sequence[int], result: Any) -> int:
    """5 n log2 n for n complex numbers, as benchmarks of transforms count; half of that where one side is real."""
    larger = x if x.numel() >= result.numel() else result
    length = math.prod(int(larger.shape[dim]) for dim in dims)
    each = 5.0 if x.is_complex() and result.is_complex() else 2.5
    return int(each * larger.numel() * math.log2(max(length, 1)))


def _backward_flops(grad: Any, x: Any, weight: Any, *options: Any) -> int:
    """The count of forward for each gradient that is wanted; torch's own count ignores groups."""
    transposed, wanted = options[4], options[7]
    places = x if transposed else grad
    return 2 * int(places.numel()) * int(weight[0].numel()) * sum(map(bool, wanted[:2]))


def tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among arguments or results, also those in lists."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [v for v in value if isinstance(v, torch.Tensor)]
    return tensors


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(v, torch.Tensor) for v in value)
    return isinstance(value, torch.Tensor)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
