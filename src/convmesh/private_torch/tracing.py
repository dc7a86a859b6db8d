"""Tracing a step into a graph of operators: `make_fx` is public, what surrounds it is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_map_only as tree_map_only

__all__ = [
    "FakeTensorMode", "graph_being_traced", "is_cast", "is_elementwise", "is_traced", "returns_views", "tree_map_only",
    "without_modes", "writes_to",
]  # fmt: skip


def is_traced() -> bool:
    """Whether `make_fx` is recording operators: tensors then have no values to look at."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def graph_being_traced() -> fx.Graph:
    """The graph to which `make_fx` adds the operators that run; its tracer is public, but access to it is not."""
    mode = get_proxy_mode()
    assert mode is not None
    graph: fx.Graph = mode.tracer.graph
    return graph


def returns_views(target: Any) -> bool:
    """Whether an operator's results share memory with its arguments, and it writes nothing."""
    if not isinstance(target, OpOverload):
        return False
    marks = [value.alias_info for value in target._schema.returns]
    return bool(marks) and all(mark is not None and not mark.is_write for mark in marks)


def is_cast(target: Any) -> bool:
    """Whether an operator copies a tensor into another type or format."""
    return target is torch.ops.aten._to_copy.default


def is_elementwise(target: Any) -> bool:
    """Whether an operator computes each element of its result from the same element of its arguments."""
    if (
        not isinstance(target, OpOverload)
        or target._schema.is_mutable
        or torch.Tag.nondeterministic_seeded in target.tags
    ):
        return False
    return torch.Tag.pointwise in target.tags or is_cast(target)


def writes_to(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operator changes in place."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    arguments = node.target._schema.arguments
    given = {**{a.name: value for a, value in zip(arguments, node.args, strict=False)}, **node.kwargs}
    written = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [value for value in written if isinstance(value, fx.Node)]
