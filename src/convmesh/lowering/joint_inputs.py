"""Dense layers that read one tensor and cut their filters alike: separate projections to queries, keys and values.

Alone, each would bring the tensor to its ranks and send its gradient back. Together they do so once.
"""

from __future__ import annotations

from collections.abc import Mapping

from convmesh.graph import Graph, Node
from convmesh.plans import Plan, split_nodes
from convmesh.plans.shared_weights import has_own_weights


def joint_readers(graph: Graph, plan: Plan, stages: Mapping[str, int]) -> frozenset[str]:
    """The nodes that take their input together with others of their stage, under a plan."""
    joint: set[str] = set()
    for group in _groups(graph):
        if len({stages.get(node.name, 0) for node in group}) == 1 and _go_together(graph, group, plan):
            joint |= {node.name for node in group}
    return frozenset(joint)


def _groups(graph: Graph) -> tuple[tuple[Node, ...], ...]:
    """Dense layers on tokens that read the same tensor, grouped by it."""
    if "joint readers" not in graph.derived:
        readers: dict[str, list[Node]] = {}
        for node in split_nodes(graph):
            if node.kind == "linear" and len(node.outputs[0].shape) > 2 and has_own_weights(graph, node):
                readers.setdefault(node.inputs[0], []).append(node)
        graph.derived["joint readers"] = tuple(tuple(nodes) for nodes in readers.values() if len(nodes) > 1)
    groups: tuple[tuple[Node, ...], ...] = graph.derived["joint readers"]
    return groups


def _go_together(graph: Graph, group: tuple[Node, ...], plan: Plan) -> bool:
    """Whether all cut their filters over the same axes, or may, and that moves no more than summing their outputs."""
    splits = [plan.split(node.layer) for node in group]
    if not splits[0].channel or len({(split.channel, split.sample) for split in splits}) > 1:
        return False
    algorithms = {split.algorithm for split in splits}
    made = sum(node.outputs[0].shape[-1] for node in group)
    return algorithms == {"y"} or (algorithms <= {"y", "auto"} and made >= _features(graph, group[0]))


def _features(graph: Graph, node: Node) -> int:
    return graph.node(node.inputs[0]).outputs[0].shape[-1]
