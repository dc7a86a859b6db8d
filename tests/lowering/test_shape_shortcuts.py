"""What shortcuts say of an operator's result is what torch says."""

import itertools
from typing import Any

import pytest
import torch

from convmesh.lowering.shape_shortcuts import _ELEMENTWISE, aten, made

SHAPES = [(4, 3, 5, 6), (1, 3, 1, 6), (2, 8), (0, 3, 2, 2)]
EXTRA: dict[Any, tuple[Any, ...]] = {
    aten.threshold_backward.default: (0,),
    aten.leaky_relu_backward.default: (0.1, False),
}


def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """A tensor of this shape in several orders in memory, with gaps as well."""
    plain = torch.empty(shape, dtype=dtype, device="meta")
    order = (0, *range(2, len(shape)), *range(1, len(shape))[:1])
    last = torch.empty_permuted(shape, order, dtype=dtype, device="meta")
    gaps = torch.empty((*shape[:-1], 2 * shape[-1]), dtype=dtype, device="meta")[..., ::2]
    return [plain, last, gaps, plain[:1].expand(shape)] if shape[0] else [plain]


def described(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return tuple(map(described, result))
    return None if result is None else (tuple(result.shape), result.stride(), result.dtype, result.storage_offset())


@pytest.mark.parametrize("func", sorted(_ELEMENTWISE, key=str), ids=str)
def test_elementwise_results_are_like_their_arguments(func: Any) -> None:
    count = sum(str(a.type) == "Tensor" for a in func._schema.arguments)
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.float16)):
        for operands in itertools.product(*[tensors(shape, dtype)] * count):
            args = (*operands, *EXTRA.get(func, ()))
            assert described(made(func, args, {})) == described(func(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norms_are_like_their_input(training: bool, dtype: torch.dtype) -> None:
    for shape in SHAPES[:2]:
        own = [torch.empty(shape[1], dtype=dtype, device="meta") for _ in range(4)]
        for x, grad in itertools.product(tensors(shape, dtype), repeat=2):
            args = (x, *own, training, 0.1, 1e-5)
            assert described(made(aten.native_batch_norm.default, args, {})) == described(aten.native_batch_norm(*args))
            for mask in ([True, True, True], [False, True, False]):
                back = (grad, x, own[0], *own[2:], *own[:2], training, 1e-5, mask)
                func = aten.native_batch_norm_backward.default
                assert described(made(func, back, {})) == described(func(*back))
