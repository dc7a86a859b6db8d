"""Every split operator on torch's own sample inputs for it: torch's outputs and gradients, or a refusal."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

import convmesh.ops
from convmesh import Mesh, shard
from convmesh.dist import OpenMesh
from convmesh.errors import ConvMeshError
from convmesh.ops import Sharded
from convmesh.ops.core.registry import has_handler, listed_name
from convmesh.private_torch import tree_leaves, tree_map
from convmesh.testing import RankPool, opened

CUTS = (("data", 0), ("height", 1), ("height", 2), ("height", 3))
"""Axes of two ranks, and the dim of the first tensor that they cut."""

MOST_SAMPLES = 16
"""Of an operator, spread evenly over torch's."""

TYPES = torch.float64, torch.complex128, torch.int64
"""The first that an operator takes."""

WITHOUT_VALUES = {"empty_like", "new_empty"}
"""Operators whose results hold anything."""

TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Ranks of their own: torch's samples come with settings of torch's own tests."""
    pytest.importorskip("expecttest", reason="torch's samples need it")
    with RankPool(2, seconds_timeout=900) as pool:
        yield pool


@pytest.mark.full
@pytest.mark.parametrize("name", sorted({*convmesh.ops.supported()} - WITHOUT_VALUES))
def test_samples_give_what_torch_gives(name: str, ranks: RankPool) -> None:
    counts = ranks.run(compared_samples, name)
    assert counts[0] == counts[1]


@pytest.mark.full
def test_samples_are_found(ranks: RankPool) -> None:
    compared, refused = ranks.run(compared_samples, "softmax")[0]
    assert compared > 0 == refused


def compared_samples(name: str) -> tuple[int, int]:
    """Samples that were compared, and refused, on this rank."""
    warnings.simplefilter("ignore")  # some samples are what torch warns of
    from torch.testing._internal.common_methods_invocations import op_db  # which changes settings of the process

    compared = refused = 0
    for axis, dim in CUTS:
        mesh = opened(Mesh(**{axis: 2}))
        for call, sample in (pair for op in op_db if name in names_of(op) for pair in calls(op)):
            if dim < first_of(sample).dim():
                is_compared = compare(call, sample, mesh, {dim: axis})
                compared, refused = compared + is_compared, refused + (not is_compared)
    return compared, refused


def names_of(op: Any) -> set[str]:
    """The names of an operator's split versions, if it takes a type that can be compared."""
    forms = [each for each in (op.op, op.method_variant) if each is not None and has_handler(each)]
    return {listed_name(each) for each in forms} if {*TYPES} & op.supported_dtypes("cpu") else set()


def calls(op: Any) -> Iterator[tuple[Callable[..., Any], Any]]:
    dtype = next(each for each in TYPES if each in op.supported_dtypes("cpu"))
    torch.manual_seed(0)
    samples = [s for s in op.sample_inputs("cpu", dtype, requires_grad=False) if tensors_in(s.input)]
    forms: list[Callable[..., Any]] = []
    if has_handler(op.op) and not inspect.ismethoddescriptor(op.op):
        forms.append(op.op)
    if op.method_variant and has_handler(op.method_variant):
        forms.append(partial(called_by_name, name=op.name))
    for form in forms:
        yield from ((form, sample) for sample in samples[:: max(1, len(samples) // MOST_SAMPLES)])


def called_by_name(x: Any, *args: Any, name: str, **kwargs: Any) -> Any:
    return getattr(x, name)(*args, **kwargs)


def first_of(sample: Any) -> Any:
    return tensors_in(sample.input)[0]


def compare(call: Callable[..., Any], sample: Any, mesh: OpenMesh, cut: dict[int, str]) -> bool:
    """Compare a call on shards with torch's; whether there was something to compare."""
    arguments = ((sample.input, *sample.args), dict(sample.kwargs))
    shape, inputs = first_of(sample).shape, {id(x) for x in tensors_in(sample.input)}
    learning = learning_in(call, arguments, inputs)
    args, kwargs = whole = tree_map(lambda x: leaf(x, learning), arguments)
    expected = call(*args, **kwargs)
    args, kwargs = parts = tree_map(
        lambda x: part(x, mesh, cut if id(x) in inputs and x.shape == shape else None, learning), arguments
    )
    try:
        results = tensors_in(call(*args, **kwargs))
    except ConvMeshError:
        return False
    wholes = tensors_in(expected)
    assert len(results) == len(wholes)
    for result, value in zip(results, wholes, strict=True):
        assert_equal(result.gather() if isinstance(result, Sharded) else result, value)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, dtype=x.dtype, generator=generator) if x.requires_grad else None for x in wholes]
    backward(wholes, cotangents)
    backward([local_of(x) for x in results], [slice_of(x, c) for x, c in zip(results, cotangents, strict=True)])
    for one, other in zip(tree_leaves(parts), tree_leaves(whole), strict=True):
        if isinstance(one, Sharded) and other.requires_grad:
            assert_equal(gradient(one.local), slice_of(one, gradient(other)))
    return True


def backward(values: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor | None]) -> None:
    pairs = [(x, c) for x, c in zip(values, cotangents, strict=True) if c is not None and x.requires_grad]
    learning = [x for x, _ in pairs if x.grad_fn is None or "NotImplemented" not in type(x.grad_fn).__name__]
    if learning and len(learning) == len(pairs):
        torch.autograd.backward(learning, [c for _, c in pairs])


def tensors_in(value: Any) -> list[Any]:
    return [x for x in tree_leaves(value) if isinstance(x, (torch.Tensor, Sharded))]


def learning_in(call: Callable[..., Any], arguments: Any, inputs: set[int]) -> set[int]:
    """The tensors, by id, that may have gradients: all, the inputs alone, or none."""
    for learning in ({id(x) for x in tensors_in(arguments)}, inputs):
        args, kwargs = tree_map(partial(leaf, learning=learning), arguments)
        try:
            call(*args, **kwargs)
        except RuntimeError:  # not differentiable with respect to all of them
            continue
        return learning
    return set()


def leaf(value: Any, learning: set[int]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    can_learn = value.is_floating_point() or value.is_complex()
    return value.detach().clone().requires_grad_(can_learn and id(value) in learning)


def part(value: Any, mesh: OpenMesh, cut: dict[int, str] | None, learning: set[int]) -> Any:
    """This rank's shard of a tensor that is cut; a whole copy of another one."""
    if cut is None:
        return leaf(value, learning)
    shards = shard(value.detach(), mesh, cut)
    return shards.like(leaf(shards.local, {id(shards.local)} if id(value) in learning else set()))


def local_of(value: Any) -> torch.Tensor:
    return value.local if isinstance(value, Sharded) else value


def slice_of(like: Any, whole: torch.Tensor | None) -> Any:
    return whole[like.box.slices()] if isinstance(like, Sharded) and whole is not None else whole


def gradient(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    is_exact = not (actual.is_floating_point() or actual.is_complex())
    sizes = torch.zeros(1) if is_exact else torch.nan_to_num(expected.detach().abs(), posinf=0)
    limit = TOLERANCE * max(1.0, float(sizes.max())) if sizes.numel() and not is_exact else 0.0
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=0, atol=limit, equal_nan=True)
