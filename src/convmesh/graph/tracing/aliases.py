"""In-place changes of a tensor that a split network would not see under the tensor's other names.

Torch's views share memory, so `x[:, :2].add_(1)` changes `x`. Split tensors share none: a change shows only in the
tensor that was changed, and a network that then reads the same memory under another name must not be split.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from convmesh.graph.tracing.node_meta import VALUE
from convmesh.private_torch import tree_leaves
from convmesh.private_torch.tensor_internals import memory_key, version_of


def versions(values: Any) -> list[tuple[torch.Tensor, int]]:
    """Tensors, each with its number of changes so far."""
    return [(leaf, version_of(leaf)) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def changed(before: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
    """The tensors that have changed since."""
    return [tensor for tensor, version in before if version_of(tensor) != version]


def lost_change(graph: fx.Graph, changes: Mapping[fx.Node, Sequence[torch.Tensor]]) -> fx.Node | None:
    """The first node that changes a tensor whose memory is read under another name later on."""
    if not changes:
        return None
    order = {node: index for index, node in enumerate(graph.nodes)}
    holders = _by_memory(_split_nodes(graph))
    return next((node for node, tensors in changes.items() if _is_lost(node, tensors, order, holders)), None)


def _by_memory(nodes: Iterable[fx.Node]) -> dict[Any, list[fx.Node]]:
    """The nodes that give a tensor, by the memory that it lies in."""
    holders: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        if isinstance(value := node.meta.get(VALUE), torch.Tensor):
            holders.setdefault(memory_key(value), []).append(node)
    return holders


def _split_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose tensors are split: those that come from the inputs. Others are whole, and share memory as ever."""
    split: set[fx.Node] = set()
    for node in graph.nodes:
        is_fresh = node.op == "call_method" and str(node.target).startswith("new_")
        given = (
            n for n in node.all_input_nodes if any(isinstance(v, torch.Tensor) for v in tree_leaves(n.meta[VALUE]))
        )
        if node.op == "placeholder" or (not is_fresh and any(n in split for n in given)):
            split.add(node)
    return split


def _gives_tensors(node: fx.Node) -> bool:
    return any(isinstance(value, torch.Tensor) for value in tree_leaves(node.meta[VALUE]))


def _is_lost(
    change: fx.Node,
    tensors: Sequence[torch.Tensor],
    order: Mapping[fx.Node, int],
    holders: Mapping[Any, Sequence[fx.Node]],
) -> bool:
    own = [node for node in change.all_input_nodes if any(node.meta[VALUE] is tensor for tensor in tensors)]
    memory = {memory_key(tensor) for tensor in tensors}
    others = [
        node
        for key in memory
        for node in holders.get(key, ())
        if order[node] < order[change] and node not in own and not _is_itself(node, own)
    ]
    readers = sorted({user for node in others for user in node.users if order[user] > order[change]}, key=order.get)  # type: ignore[arg-type]
    # `x[:, 0] += 1` changes a part of x and then sets it.
    return bool(readers) and not (readers[0].target is operator.setitem and readers[0].args[2] is change)


def _is_itself(node: fx.Node, own: Sequence[fx.Node]) -> bool:
    """Whether in-place changes of a node returned one of `own`: both names stand for one split tensor."""
    gives = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow}
    chain = [*own]
    while chain:
        one = chain.pop()
        in_place = one.target in gives or (one.op == "call_method" and str(one.target).endswith("_"))
        if in_place and one.args:
            if one.args[0] is node:
                return True
            chain.append(one.args[0])  # type: ignore[arg-type]
    return False
