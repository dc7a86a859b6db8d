"""Cost of each node of a network to a pipeline stage, from the program of one rank."""

from __future__ import annotations

from collections.abc import Iterable

from convmesh.graph import Graph
from convmesh.plans.balance import Cost
from convmesh.plans.program import NodeProgram, Program
from convmesh.plans.steps import Work

FLOPS_PER_SECOND = 50e12
"""Rate for which stages are balanced: what a data-centre GPU reaches on convolutions in TF32."""

BYTES_PER_SECOND = 2e12
"""Memory bandwidth of that device; stages depend on the ratio of the two only."""


def node_costs(program: Program, graph: Graph) -> dict[str, Cost]:
    """By node: seconds of forward and backward, bytes of weights, and bytes kept for backward."""
    bytes_of = {weight.name: weight.bytes_held for weight in program.weights}
    counted: set[str] = set()
    costs: dict[str, Cost] = {}
    for node in program.nodes:
        costs[node.node] = Cost(
            seconds=_seconds(step for step in (*node.forward, *node.backward) if isinstance(step, Work)),
            bytes_weights=sum(bytes_of.pop(weight.name, 0) for weight in graph.node(node.node).weights),
            bytes_kept=_kept(node, graph, counted),
        )
    return costs


def _seconds(steps: Iterable[Work]) -> float:
    """A lower bound: each operator takes the longer of its arithmetic and its memory traffic."""
    return sum(max(step.flops / FLOPS_PER_SECOND, step.bytes_moved / BYTES_PER_SECOND) for step in steps)


def _kept(node: NodeProgram, graph: Graph, counted: set[str]) -> int:
    """Bytes kept for backward; a value that two nodes keep counts for the first."""
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
