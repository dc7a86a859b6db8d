"""What shortcuts say of an operator's result is what torch says."""

import itertools
from typing import Any

import pytest
import torch

from convmesh.graph.tracing.shape_shortcuts import _COMPARED, _ELEMENTWISE, _RESIZED, _SPREAD, aten, made

SHAPES = [(4, 3, 5, 6), (1, 3, 1, 6), (2, 8), (0, 3, 2, 2)]
EXTRA: dict[Any, tuple[Any, ...]] = {
    aten.threshold_backward.default: (0,),
    aten.leaky_relu_backward.default: (0.1, False),
    aten.mul.Scalar: (3,),
    aten.clamp.default: (None, 0),
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


@pytest.mark.parametrize("func", sorted(_COMPARED, key=str), ids=str)
def test_comparisons_are_like_their_argument(func: Any) -> None:
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.float16)):
        for x in tensors(shape, dtype):
            assert described(made(func, (x, 0.5), {})) == described(func(x, 0.5))


OPERANDS = [
    (4, 3, 5, 6),
    (3, 5, 6),
    (1, 3, 1, 1),
    (3, 1, 1),
    (4, 3, 5, 1),
    (4, 1, 5, 6),
    (6,),
    (1,),
    (),
    (1, 4, 3, 5, 6),
]


@pytest.mark.parametrize("func", sorted(_SPREAD, key=str), ids=str)
def test_smaller_arguments_are_repeated_as_torch_repeats_them(func: Any) -> None:
    wholes = tensors(OPERANDS[0], torch.float32)
    others = [t for shape in OPERANDS for t in (tensors(shape, torch.float32) if len(shape) > 1 else [])]
    others += [torch.empty(shape, dtype=dtype, device="meta") for shape in OPERANDS for dtype in TYPES_MIXED]
    for pair in itertools.product(wholes, others):
        for one, other in (pair, pair[::-1]):
            for first in _conditions(func):
                args = (*first, one, other)
                assert described(made(func, args, {})) == described(func(*args))


TYPES_MIXED = (torch.float32, torch.float64, torch.bool)


def _conditions(func: Any) -> list[tuple[torch.Tensor, ...]]:
    if func is not aten.where.self:
        return [()]
    shapes = [(4, 3, 5, 6), (3, 1, 1), ()]
    return [(torch.empty(shape, dtype=torch.bool, device="meta"),) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_softmax_is_like_its_argument(dtype: torch.dtype) -> None:
    for shape, dim in itertools.product(SHAPES, (0, -1)):
        for x, grad in itertools.product(tensors(shape, dtype), repeat=2):
            for args in ((x, dim), (x, dim, None), (x, dim, dtype), (x, dim, torch.float64)):
                func = aten._safe_softmax.default
                assert described(made(func, args, {})) == described(func(*args))
            back = aten._softmax_backward_data.default
            assert described(made(back, (grad, x, dim, dtype), {})) == described(back(grad, x, dim, dtype))


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


ROWS = [((4, 5, 6), 1), ((4, 6), 1), ((2, 3, 4, 5), 2), ((1, 5, 6), 1), ((4, 1), 1), ((3, 0), 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("shape", "dims"), ROWS, ids=str)
def test_layer_norms_are_like_their_input(shape: tuple[int, ...], dims: int, dtype: torch.dtype) -> None:
    normalised = list(shape[len(shape) - dims :])
    weight = torch.empty(normalised, dtype=dtype, device="meta")
    for x, grad in itertools.product(tensors(shape, dtype), repeat=2):
        forward, backward = aten.native_layer_norm.default, aten.native_layer_norm_backward.default
        args = (x, normalised, weight, weight, 1e-5)
        _, *statistics = expected = forward(*args)
        assert described(made(forward, args, {})) == described(expected)
        for mask in ([True] * 3, [True, False, False]):
            back = (grad, x, normalised, *statistics, weight, weight, mask)
            assert described(made(backward, back, {})) == described(backward(*back))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(4, 3, 5), (1, 3, 5), (4, 3, 1), (4, 1, 5), (0, 3, 5)])
def test_products_have_the_shape_that_torch_finds(rows: int, inner: int, columns: int, dtype: torch.dtype) -> None:
    for bias in ((columns,), (1, columns), (rows, columns), (1,)):
        vector = torch.empty(bias, dtype=dtype, device="meta")
        for one, other in itertools.product(tensors((rows, inner), dtype), tensors((columns, inner), dtype)):
            args = (vector, one, other.t())
            assert described(made(aten.addmm.default, args, {})) == described(aten.addmm(*args))


KERNELS = [(8, 3, 3, 3), (8, 3, 1, 1), (6, 1, 3, 2), (2, 3, 5, 7)]


@pytest.mark.parametrize("shape", SHAPES[:2] + SHAPES[3:], ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_convolutions_have_the_shape_that_torch_finds(shape: tuple[int, ...], kernel: tuple[int, ...]) -> None:
    groups = shape[1] // kernel[1]
    for x, weight in itertools.product(tensors(shape, torch.float32), tensors(kernel, torch.float32)):
        for stride, padding, dilation in itertools.product((1, 2), (0, 2, 3), (1, 2)):
            how = ([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], groups)
            expected = outcome(aten.convolution.default, (x, weight, None, *how))
            assert outcome(lambda *args: made(aten.convolution.default, args, {}), (x, weight, None, *how)) == expected
            if isinstance(expected, str):
                continue
            for grad, mask in itertools.product(
                tensors(expected[0], torch.float32), ([True] * 3, [False, True, False])
            ):
                back = (grad, x, weight, [kernel[0]], *how, mask)
                func = aten.convolution_backward.default
                assert described(made(func, back, {})) == described(func(*back))


def outcome(func: Any, args: Any) -> Any:
    try:
        return described(func(*args))
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_joined_tensors_have_the_shape_that_torch_finds(dim: int) -> None:
    shapes = [(4, 3, 5, 6), (4, 7, 5, 6), (2, 3, 5, 6), (4, 3, 5, 1), (4, 3, 5, 0)]
    choices = [tensor for shape in shapes for tensor in tensors(shape, torch.float32)[:3]]
    for pair in itertools.product(choices, repeat=2):
        expected = outcome(aten.cat.default, (list(pair), dim))
        assert outcome(lambda *args: made(aten.cat.default, args, {}), (list(pair), dim)) == expected


@pytest.mark.parametrize("func", sorted(_RESIZED, key=str), ids=str)
def test_interpolations_have_the_extents_that_were_asked_for(func: Any) -> None:
    dims = next(d for d in (1, 2, 3) if f"{d}d" in str(func))
    for shape, extents in [((4, 3, 5, 6, 3), (7, 3, 2)), ((4, 1, 5, 6, 3), (7, 3, 2)), ((2, 3, 4, 2, 6), (1, 9, 4))]:
        for x in tensors(shape[: dims + 2], torch.float32)[: 1 if "bicubic" in str(func) else 2]:  # torch takes long
            args = (x, extents[:dims], False, *[None] * dims)
            assert described(made(func, args, {})) == described(func(*args))


def test_interpolations_that_torch_may_refuse_are_left_to_torch() -> None:
    x = torch.empty(2, 3, 4, 4, device="meta")
    for extents in [(0, 4), (3,), (2, 2, 2)]:
        args = (x, extents, False, None, None)
        assert _outcome(made, aten.upsample_bilinear2d.default, args, {}) == _outcome(
            aten.upsample_bilinear2d.default, *args
        )


def _outcome(call: Any, *args: Any) -> Any:
    try:
        return described(call(*args))
    except Exception as error:
        return type(error)
