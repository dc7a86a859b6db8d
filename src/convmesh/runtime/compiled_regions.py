"""Local parts through torch.compile: runs of pointwise operators, fused into one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn

from convmesh.ops.core.sharded import Sharded
from convmesh.plans import NodeProgram, Transfer
from convmesh.private_torch import tree_map
from convmesh.runtime.graph_regions import replace_regions


def fusible(program: NodeProgram, kind: str) -> bool:
    """Whether a node is a pointwise function of shards of one layout, without any transfer."""
    is_local = not any(isinstance(step, Transfer) for step in (*program.forward, *program.backward))
    return kind == "pointwise" and is_local and {*program.inputs} == {*program.outputs}


class CompiledPart(nn.Module):
    """A run of fusible nodes, compiled, on plain tensors."""

    def __init__(self, module: fx.GraphModule, backend: str) -> None:
        super().__init__()
        self._module = torch.compile(module, backend=backend, dynamic=False)

    def forward(self, *args: Any) -> Any:
        first = next(x for x in args if isinstance(x, Sharded))
        results = self._module(*(x.local if isinstance(x, Sharded) else x for x in args))
        return tree_map(first.like, results)


def compile_parts(graph: fx.Graph, parts: dict[str, Any], chosen: Collection[str], backend: str) -> None:
    """Replace runs of at least two of the `chosen` nodes by compiled functions."""

    def key(node: fx.Node) -> str | None:
        return "local" if node.name in chosen else None

    replace_regions(graph, parts, key, lambda module: CompiledPart(module, backend), least=2)
