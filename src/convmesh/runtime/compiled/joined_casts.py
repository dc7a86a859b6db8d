"""Casts of many tensors as one call: of all weights before forward, and of their gradients.

Autocast casts every weight, and every gradient back. On a GPU each is a launch, which takes longer than most casts.
Gradients that go into a bucket are not cast at all: they are copied there in the type that they have.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from convmesh.gradients.local_gradients import is_dense
from convmesh.private_torch.tensor_internals import copy_all_
from convmesh.private_torch.tracing import is_cast, returns_views, writes_to


def cast_all(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Tensors cast to other types; each keeps its memory format."""
    made = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    copy_all_(made, tensors)
    return made


def join_weight_casts(graph: fx.Graph, tangents: int) -> None:
    """Make all casts of forward's inputs in one call, before anything else; the first `tangents` are backward's."""
    written = {source for node in graph.nodes for source in writes_to(node)}
    given = {n for n in graph.find_nodes(op="placeholder")[tangents:] if n not in written}
    casts = [n for n in graph.nodes if _keeps_format(n) and n.args[0] in given]
    if len(casts) > 1:
        first = next(n for n in graph.nodes if n.op != "placeholder")
        for cast, made in zip(casts, _joined(graph, casts, before=first), strict=True):
            cast.replace_all_uses_with(made)
            graph.erase_node(cast)


def join_gradient_casts(graph: fx.Graph, gradients: int, bucketed: Iterable[int]) -> None:
    """Drop the casts of `bucketed` gradients, and make the others in one call after backward."""
    (output,) = graph.find_nodes(op="output")
    results: list[fx.Node] = list(output.args[0])
    border, raw = len(results) - gradients, {*bucketed}
    ended = [i for i in range(gradients) if _ends_with_cast(results[border + i])]
    joined = [i for i in ended if i not in raw]
    for i in ended:
        if i in raw:
            results[border + i] = results[border + i].args[0]  # type: ignore[assignment]
    if len(joined) > 1:
        made = _joined(graph, [results[border + i] for i in joined], before=output)
        for i, node in zip(joined, made, strict=True):
            results[border + i] = node
    output.args = (results,)
    graph.eliminate_dead_code()


def _joined(graph: fx.Graph, casts: Sequence[fx.Node], before: fx.Node) -> list[fx.Node]:
    """Nodes for the values of `casts`, all made by one call."""
    with graph.inserting_before(before):
        sources, dtypes = [cast.args[0] for cast in casts], [cast.meta["val"].dtype for cast in casts]
        call = graph.call_function(cast_all, (sources, dtypes))
        made = [graph.call_function(operator.getitem, (call, place)) for place in range(len(casts))]
    for node, cast in zip(made, casts, strict=True):
        node.meta["val"] = cast.meta["val"]
    return made


def _ends_with_cast(node: Any) -> bool:
    """Whether a result is a cast that nothing else reads, and its source is not a view."""
    return _keeps_format(node) and len(node.users) == 1 and not returns_views(node.args[0].target)


def _keeps_format(node: Any) -> bool:
    """Whether a node casts a dense tensor and keeps its strides."""
    if node.op != "call_function" or not is_cast(node.target):
        return False
    cast, value = node.meta["val"], node.args[0].meta["val"]
    return is_dense(value) and cast.device == value.device and cast.stride() == value.stride()
