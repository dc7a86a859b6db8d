"""Weights that several layers share: whether they can be cut, and how, so that all of their layers agree.

An embedding and the dense layer that turns features back into scores of words are cut along the words: the one by rows
of its table, whose sums are the features, the other by its filters.
"""

from __future__ import annotations

from typing import Literal

from convmesh.graph import Graph, Node

CUTS_CHANNELS = ("conv", "conv_transpose", "linear", "embedding", "recurrent layer")
"""Kinds of layers whose weights channels and filters cut."""


READ = "attribute"
"""The operator of nodes that only read a weight for others."""


def has_own_weights(graph: Graph, node: Node) -> bool:
    """Whether a dense layer's weights are the model's: it is a module, or a function called on them directly."""
    if node.op != "linear":
        return node.op == "Linear"
    return len(node.inputs) > 1 and all(_is_parameter(graph.node(name)) for name in node.inputs[1:])


def _is_parameter(node: Node) -> bool:
    return node.op == READ and any(not weight.is_buffer for weight in node.weights)


def cut_kind(node: Node) -> str:
    """A node's kind; embeddings have their own, and recurrent layers are distinct from functions without weights."""
    if node.is_recurrent:
        return "recurrent layer"
    return "embedding" if is_table(node) else node.kind


def is_table(node: Node) -> bool:
    """Whether a node is an embedding whose table may be cut: one that looks rows up, and does nothing else."""
    settings = str(node.options.get("settings", ""))
    return node.op == "Embedding" and not any(word in settings for word in ("max_norm", "scale_grad", "sparse"))


def sharers(graph: Graph, node: Node) -> tuple[Node, ...]:
    """The nodes of other layers that use a weight of this one."""
    if "users of weights" not in graph.derived:
        users: dict[str, list[Node]] = {}
        for user in graph.nodes:
            for weight in user.weights if user.op != READ else ():
                users.setdefault(weight.name, []).append(user)
        graph.derived["users of weights"] = users
    by_weight: dict[str, list[Node]] = graph.derived["users of weights"]
    by_name = {other.name: other for weight in node.weights for other in by_weight[weight.name]}
    return tuple(other for other in by_name.values() if other.layer != node.layer)


def may_cut(graph: Graph, node: Node) -> bool:
    """Whether a layer's weight may be cut: all other layers that use it must allow that too."""
    return all(cut_kind(user) in CUTS_CHANNELS for user in (node, *sharers(graph, node)))


def shared_algorithm(graph: Graph, node: Node) -> Literal["x", "y"] | None:
    """The algorithm of a dense layer or an embedding that shares its weight; None if the layer is free to choose."""
    if not sharers(graph, node) or cut_kind(node) not in ("linear", "embedding"):
        return None
    return "x" if is_table(node) else "y"
