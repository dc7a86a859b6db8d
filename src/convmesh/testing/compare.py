"""Compares the outputs and gradients of a split operator with those of a single device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from convmesh.dist import OpenMesh, all_reduce
from convmesh.ops import Sharded, shard

Cut = Mapping[int, str | Sequence[str]]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}


def check_split(
    fn: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    mesh: OpenMesh,
    cuts: Sequence[Cut],
    seed: int = 0,
) -> None:
    """Assert that `fn(*inputs, *params)` on shards equals `fn` on whole tensors, with all gradients.

    Call it on every rank with the same arguments. `inputs` are cut by `cuts`, `params` are replicated. Gradients are
    taken for random cotangents; outputs, input gradients and parameter gradients must agree to the type's tolerance.
    """
    expected, expected_grads = _run(fn, [_leaf(t) for t in (*inputs, *params)], seed)
    shards = [shard(t, mesh, cut) for t, cut in zip(inputs, cuts, strict=True)]
    leaves = [_leaf(s.local) for s in shards] + [_leaf(p) for p in params]
    wrapped = [s.like(leaf) for s, leaf in zip(shards, leaves, strict=False)]
    outputs = _tensors(fn(*wrapped, *leaves[len(inputs) :]))
    assert len(outputs) == len(expected), f"{len(outputs)} outputs instead of {len(expected)}"
    for index, (output, whole) in enumerate(zip(outputs, expected, strict=True)):
        assert isinstance(output, Sharded), f"output {index} is a {type(output).__name__}, not a Sharded tensor"
        assert output.shape == whole.shape, f"output {index}: shape {output.shape} instead of {whole.shape}"
        assert_close(output.local, _slice(output, whole), whole, f"output {index}")
    grads = _grads(
        [o.local for o in outputs],
        [_slice(o, c) for o, c in zip(outputs, _cotangents(expected, seed), strict=True)],
        leaves,
    )
    for index, (leaf, grad, whole) in enumerate(zip(leaves, grads, expected_grads, strict=True)):
        if index < len(shards):
            assert_close(grad, _slice(shards[index], whole), whole, f"gradient of input {index}")
        else:
            assert_close(grad, whole, whole, f"gradient of parameter {index - len(shards)}")
        del leaf


def assert_close(actual: torch.Tensor, expected: torch.Tensor, whole: torch.Tensor, what: str) -> None:
    """Assert that two tensors agree to the tolerance of their type, relative to the largest value of `whole`."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} instead of {expected.dtype}"
    if not actual.dtype.is_floating_point:
        assert torch.equal(actual, expected), f"{what} differs"
        return
    if not actual.numel():
        return
    both = torch.isclose(actual, expected, rtol=0, atol=0, equal_nan=True)  # infinities and NaNs must match exactly
    difference = torch.where(both, 0, actual - expected).abs().max().item()
    scale = torch.where(whole.isfinite(), whole, 0).abs().max().item() or 1.0
    limit = TOLERANCE[actual.dtype]
    assert difference <= limit * scale, f"{what}: relative error {difference / scale:.3g} > {limit:g}"


def adjoint_error(
    forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, y: torch.Tensor, mesh: OpenMesh
) -> float:
    """|⟨F x, y⟩ − ⟨x, F* y⟩| relative to its size, summed over ranks, for a linear `forward` on shards `x` and `y`."""
    leaf = _leaf(x)
    out = forward(leaf)
    (pulled,) = _grads([out], [y], [leaf])
    pair = torch.stack([(out.detach() * y).sum().double(), (x * pulled).sum().double()])
    size = torch.stack([(out.detach() * y).abs().sum().double()])

    left, right = all_reduce(pair, mesh, tuple(mesh.mesh.axes)).tolist()
    scale = all_reduce(size, mesh, tuple(mesh.mesh.axes)).item()
    return float(abs(left - right) / (scale or 1.0))


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    leaf = tensor.detach().clone()
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


def _run(
    fn: Callable[..., Any], leaves: list[torch.Tensor], seed: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    outputs = _tensors(fn(*leaves))
    return [o.detach() for o in outputs], _grads(outputs, _cotangents(outputs, seed), leaves)


def _tensors(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _cotangents(outputs: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    # Not the inputs' seed: a cotangent equal to the input has almost no gradient through a normalisation.
    generator = torch.Generator().manual_seed(seed + 1)
    return [
        torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) if o.is_floating_point() else o
        for o in outputs
    ]


def _grads(
    outputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if pairs:
        torch.autograd.backward([o for o, _ in pairs], [c for _, c in pairs])
    return [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]


def _slice(like: Sharded, whole: torch.Tensor) -> torch.Tensor:
    return whole[like.box.slices()]
