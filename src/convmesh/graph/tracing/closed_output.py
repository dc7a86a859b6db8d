"""Output shapes of a closed module that depend on data: found by running a copy of it on a few samples."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from convmesh.graph.tracing.closed import FailedError
from convmesh.private_torch import tree_leaves, tree_map

_SAMPLES = 2
"""Enough for batch statistics, few enough for any machine."""


def trial_output(module: nn.Module, args: Any, kwargs: Any, layer: str) -> Any:
    """The module's output without data, for as many samples as `args` have."""
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise FailedError(
            layer,
            "the shape of its output depends on the data, and its weights are on the meta device; build it on a real "
            "device to capture the model",
        )
    samples = next((leaf.shape[0] for leaf in tree_leaves((args, kwargs)) if _has_samples(leaf)), 0)
    few = min(samples, _SAMPLES)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        args, kwargs = tree_map(lambda leaf: _with_data(leaf, samples, few), (args, kwargs))
        try:
            output = copy.deepcopy(module).cpu()(*args, **kwargs)
        except Exception as error:
            raise FailedError(layer, f"{type(error).__name__}: {error}") from error
    return tree_map(lambda leaf: _without_data(leaf, few, samples), output)


def _has_samples(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0


def _with_data(leaf: Any, samples: int, few: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = _resized(leaf.shape, samples, few)
    is_real = leaf.is_floating_point() or leaf.is_complex()
    return torch.ones(shape, dtype=leaf.dtype) if is_real else torch.zeros(shape, dtype=leaf.dtype)


def _without_data(leaf: Any, few: int, samples: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty(_resized(leaf.shape, few, samples), dtype=leaf.dtype, device="meta")


def _resized(shape: torch.Size, old: int, new: int) -> tuple[int, ...]:
    return (new, *shape[1:]) if shape and shape[0] == old else tuple(shape)
