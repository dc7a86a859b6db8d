"""Does a captured network compute what its model computes? One step of both on the same small batch decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from convmesh.graph.checking.distance import distance, size_of
from convmesh.graph.checking.trial_step import StepResults, Tensors, TrialStep
from convmesh.private_torch import tree_leaves

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
COARSE = 5e-2
"""Relative, for types with fewer digits."""

ON_ACCELERATORS = 100.0
"""How much further two runs of the same step may differ where kernels are chosen anew and add in any order."""

NOISE = 1e-3
"""A tensor this much smaller than the largest of its kind may be rounding alone, as a bias before a batch norm is."""


@dataclass(frozen=True)
class Mismatch:
    """Which tensor of a step differs, and by how much of its size."""

    tensor: str
    error: float

    def __str__(self) -> str:
        return f"{self.tensor} differs by {self.error:.2g} of its size"


def mismatch(actual: StepResults, expected: StepResults, device: torch.device) -> Mismatch | None:
    """The first tensor that differs between two runs."""
    slack = 1.0 if device.type == "cpu" else ON_ACCELERATORS
    for (kind, here), (_, there) in zip(actual.by_kind, expected.by_kind, strict=True):
        for tensor, error, allowed in _compared(here, there):
            if error > slack * allowed:
                return Mismatch(f"{kind} {tensor}", error)
    return None


def _compared(actual: Tensors, expected: Tensors) -> Iterator[tuple[str, float, float]]:
    """The relative difference of unequal tensors, and how much is allowed; a missing tensor counts as zeros."""
    unequal = [name for name in {**expected, **actual} if not _equal(actual.get(name), expected.get(name))]
    largest = max(map(size_of, expected.values()), default=1.0) if unequal else 1.0
    for name in unequal:
        here, there = actual.get(name), expected.get(name)
        known = there if there is not None else actual[name]
        scale = max(size_of(known), NOISE * largest)
        apart = distance(_or_zeros(here, known), _or_zeros(there, known))
        yield name, apart / scale, TOLERANCE.get(known.dtype, COARSE)


def _equal(actual: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    return actual is not None and expected is not None and torch.equal(actual, expected)


def _or_zeros(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if tensor is None else tensor.detach()


def first_layer(step: TrialStep, network: fx.GraphModule) -> str:
    """Where the captured network's forward departs from the model's: its first module with another output."""
    expected = _outputs(step, step.model)
    actual = _outputs(step, network)
    called = {str(node.target) for node in network.graph.nodes if node.op == "call_module"}
    of_model = {(path, count): values for path, count, values in expected if path in called}
    agreed = ""
    for path, count, values in actual:
        if not _alike(values, of_model.get((path, count))):
            return f"the first layer to differ is `{path}`"
        agreed = path
    return f"all layers agree up to `{agreed}`, the last module" if agreed else ""


def _alike(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor] | None) -> bool:
    if expected is None or len(actual) != len(expected):
        return False
    pairs = zip(actual, expected, strict=True)
    return all(distance(a, b) <= TOLERANCE.get(b.dtype, COARSE) * size_of(b) for a, b in pairs)


def _outputs(step: TrialStep, network: nn.Module) -> list[tuple[str, int, list[torch.Tensor]]]:
    """The path of every module that runs, how often it ran before, and its outputs."""
    calls: list[tuple[str, int, list[torch.Tensor]]] = []
    counts: Counter[str] = Counter()

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            del module, args
            tensors = [t.detach().clone() for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
            calls.append((path, counts[path], tensors))
            counts[path] += 1

        return hook

    hooks = [part.register_forward_hook(note(path)) for path, part in step.model.named_modules() if path]
    try:
        step.of(network)
    finally:
        for handle in hooks:
            handle.remove()
    return calls
