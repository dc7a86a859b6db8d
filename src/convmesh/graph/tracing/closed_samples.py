"""Whether a closed module looks at samples one by one: only then may ranks run it on parts of the batch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from convmesh.graph.tracing.closed import Closed
from convmesh.graph.tracing.node_meta import VALUE, arguments_of
from convmesh.private_torch import tree_leaves, tree_map

_SAMPLES = 2
MOST_ELEMENTS = 2**24
"""Of a try's inputs: more would take long."""


def sees_whole_batch(model: nn.Module, graph: fx.Graph, closed: Mapping[str, Closed]) -> frozenset[str]:
    """The closed modules of which a sample's output may depend on other samples.

    Python that looks at values may take another branch on a part of the batch, and no try shows it. Others are tried:
    their output for a sample must stay when the other one changes.
    """
    calls = [node for node in graph.nodes if node.op == "call_module" and node.target in closed]
    return frozenset(str(node.target) for node in calls if not _keeps_apart(model, node, closed[str(node.target)]))


def _keeps_apart(model: nn.Module, node: fx.Node, closed: Closed) -> bool:
    if closed.looks_at_values:
        return False
    args, kwargs = arguments_of(node, lambda argument: argument.meta[VALUE])
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    module = model.get_submodule(str(node.target))
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())) or not _is_small(given):
        return False
    try:
        return _agree(*(_outputs(module, args, kwargs, given, other) for other in (1, 2)))
    except Exception:  # the user's code may fail in any way on random numbers
        return False


def _is_small(given: Sequence[torch.Tensor]) -> bool:
    samples = given[0].shape[0] if given and given[0].dim() else 0
    return samples > 0 and sum(x.numel() for x in given) // samples * _SAMPLES <= MOST_ELEMENTS


def _outputs(
    module: nn.Module, args: Any, kwargs: Any, given: Sequence[torch.Tensor], other: int
) -> list[torch.Tensor]:
    """What the module makes of the first of two samples; `other` is the seed of the second one."""
    samples = given[0].shape[0]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        args, kwargs = tree_map(lambda leaf: _drawn(leaf, samples, other), (args, kwargs))
        torch.default_generator.manual_seed(0)  # masks of dropout
        output = copy.deepcopy(module).cpu()(*args, **kwargs)
    made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    if any(not leaf.dim() or leaf.shape[0] != _SAMPLES for leaf in made):
        raise ValueError("it returns something else than one value a sample")
    return [leaf[0] for leaf in made]


def _drawn(leaf: Any, samples: int, other: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not leaf.dim() or leaf.shape[0] != samples:
        return torch.ones(leaf.shape, dtype=leaf.dtype)
    each = [_values(leaf.shape[1:], leaf.dtype, torch.Generator().manual_seed(seed)) for seed in (0, other)]
    return torch.stack(each)


def _values(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(tuple(shape), dtype=dtype, generator=generator)
    return torch.randint(0, 2, tuple(shape), generator=generator).to(dtype)


def _agree(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Whether outputs are the same to rounding; not-a-numbers are not."""
    return bool(first) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(first, second, strict=True)
    )
