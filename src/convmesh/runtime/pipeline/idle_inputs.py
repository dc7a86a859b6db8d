"""Inputs of a stage from which nothing learns, such as an image that is passed on for its size alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def idle_inputs(results: Iterable[torch.Tensor], given: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The places of inputs that want a gradient and get none from the results."""
    reached = _leaves_behind(results)
    return tuple(at for at, x in enumerate(given) if x.requires_grad and id(x) not in reached)


def _leaves_behind(results: Iterable[torch.Tensor]) -> set[int]:
    waiting = [result.grad_fn for result in results]
    seen, leaves = set(), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return leaves
