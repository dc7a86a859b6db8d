"""What each node of a network costs a pipeline stage, from the program of one rank."""

from __future__ import annotations

from collections.abc import Iterable

from convmesh.graph import Graph
from convmesh.plans.balance import Cost
from convmesh.plans.program import NodeProgram, Program
from convmesh.plans.steps import Work

FLOPS_PER_SECOND = 50e12
"""Of a device that stages are balanced for: what a data-centre GPU reaches on convolutions in TF32."""

BYTES_PER_SECOND = 2e12
"""Of that device's memory. Stages depend on the ratio of the two only."""


def node_costs(program: Program, graph: Graph) -> dict[str, Cost]:
    """By node: time of forward and backward, bytes of its weights, and bytes that it keeps for backward."""
    bytes_of = {weight.name: weight.bytes_held for weight in program.weights}
    counted: set[str] = set()
    found: dict[str, Cost] = {}
    for node in program.nodes:
        found[node.node] = Cost(
            seconds=_seconds(step for step in (*node.forward, *node.backward) if isinstance(step, Work)),
            bytes_weights=sum(bytes_of.pop(weight.name, 0) for weight in graph.node(node.node).weights),
            bytes_kept=_kept(node, graph, counted),
        )
    return found


def _seconds(steps: Iterable[Work]) -> float:
    """At least: an operator waits for its arithmetic or for its memory, whichever is slower."""
    return sum(max(step.flops / FLOPS_PER_SECOND, step.bytes_moved / BYTES_PER_SECOND) for step in steps)


def _kept(node: NodeProgram, graph: Graph, counted: set[str]) -> int:
    """Bytes kept for backward; a value that two nodes keep is counted at the first."""
    sources = [name for name in graph.node(node.node).inputs if graph.node(name).outputs]
    total = 0
    for saved in node.saved:
        name = node.node if saved.what == "output" else None
        if saved.what == "input" and saved.index < len(sources):
            name = sources[saved.index]
        if saved.what != "weight" and name not in counted:
            total += saved.bytes_kept
            counted.update(() if name is None else (name,))
    return total
