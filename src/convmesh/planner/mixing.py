"""Mixing strategies: for every layer the split that costs least, given those of its neighbours.

Every node is lowered alone and priced for each layout that its inputs may have; the oracle's elimination chooses among
all combinations. It does not see overlap, so its plans are simulated in full afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from convmesh.graph import Captured, Graph, Node
from convmesh.layout import Mesh
from convmesh.lowering.arrange import input_user
from convmesh.lowering.node_options import SingleLowering
from convmesh.oracle import Assumptions
from convmesh.oracle.memory.peak import bytes_of_libraries
from convmesh.oracle.search.bounded import PricedFactor, minimise_within
from convmesh.oracle.search.elimination import Choices, Factor
from convmesh.oracle.search.layer_splits import splits_of
from convmesh.planner.node_prices import NodePrices
from convmesh.planner.node_states import NodeState, NodeStates
from convmesh.planner.predicting import representatives
from convmesh.plans import Plan, Split, split_nodes
from convmesh.plans.shared_weights import may_cut, sharers
from convmesh.system import System

SHARES_EXPOSED = (1.0, 0.2)
"""Shares of gradient sums that backward may leave exposed; there is a best mix for each."""


def mixes_on(
    captured: Captured, mesh: Mesh, system: System, assumptions: Assumptions, empty: Plan
) -> Iterator[dict[str, Split]]:
    """Splits by layer that cost least on a mesh within the devices' memory; `empty` is a plan without cuts."""
    if all(len(splits_of(node, captured.graph, mesh)) == 1 for node in split_nodes(captured.graph)):
        return  # nothing to choose
    lowering = SingleLowering(captured, empty, representatives(mesh)[0], system.torch_device)
    nodes = NodeStates(captured, lowering, mesh)
    nodes.explore()
    network, prices = _Tables(nodes), NodePrices(system, mesh, assumptions, lowering.weights)
    libraries = bytes_of_libraries(mesh.size if system.torch_device == "cuda" else 0)
    bound = max(0.0, float(system.device.bytes_memory) - libraries)
    for share in SHARES_EXPOSED:
        priced = [*network.priced(prices, share)]
        best = minimise_within(priced, bound, network.start())
        if best is not None:
            yield network.chosen(best.choices)


@dataclass(frozen=True)
class _Tables:
    """What a mix is chosen from: the states of all nodes, what they cost, and which go together."""

    nodes: NodeStates

    @property
    def _graph(self) -> Graph:
        return self.nodes.captured.graph

    def start(self) -> Choices:
        """The first split of every layer, which is allowed."""
        choices: Choices = {}
        for name in self.nodes.states:
            before = tuple(choices[source] for source in self.nodes.sources[name])
            firsts = [at[-1] for at in self.nodes.singles[name] if at[:-1] == before]
            choices[name] = min(firsts, default=0)
        return choices

    def chosen(self, choices: Mapping[Any, int]) -> dict[str, Split]:
        """The splits of the chosen states."""
        taken = ((self._graph.node(n).layer, states[choices[n]].split) for n, states in self.nodes.states.items())
        return {layer: split for layer, split in taken if split is not None}

    def priced(self, prices: NodePrices, share: float) -> Iterator[PricedFactor]:
        """Tables of seconds and bytes for all nodes, and constraints between states."""
        tables: dict[int, tuple[Any, Any]] = {}
        for name, states in self.nodes.states.items():
            if self.nodes.sources[name] or self.nodes.singles[name]:
                singles = self.nodes.singles[name]
                if id(singles) not in tables:
                    tables[id(singles)] = self._of_node(name, prices, share)
                seconds, use = tables[id(singles)]
                names = (*self.nodes.sources[name], name)
                yield PricedFactor(Factor(names, seconds), Factor(names, use))
            else:
                yield _tied((name,), np.zeros(len(states)))
        for node in self._graph.inputs:
            if user := input_user(self._graph, node.name):
                yield self._as_user_wants(node.name, user)
        yield from self._same_layers()
        yield from self._same_weights()

    def _of_node(self, name: str, prices: NodePrices, share: float) -> tuple[Any, Any]:
        """Seconds and bytes of a node for all states of its inputs and its own."""
        shape = [len(self.nodes.states[source]) for source in (*self.nodes.sources[name], name)]
        seconds, use = np.full(shape, np.inf), np.zeros(shape)
        priced: dict[int, tuple[float, float]] = {}
        for at, single in self.nodes.singles[name].items():
            if id(single) not in priced:
                priced[id(single)] = prices.seconds(single, share), prices.bytes(single)
            seconds[at], use[at] = priced[id(single)]
        return seconds, use

    def _as_user_wants(self, name: str, user: Node) -> PricedFactor:
        table = np.full((len(self.nodes.states[name]), len(self.nodes.states[user.name])), np.inf)
        for at, state in enumerate(self.nodes.states[user.name]):
            wanted = self.nodes.lowering.input(name, user, state.split or Split())
            table[[s.value == wanted for s in self.nodes.states[name]], at] = 0
        return _tied((name, user.name), table)

    def _same_layers(self) -> Iterator[PricedFactor]:
        """A layer that runs several times has one split."""
        first: dict[str, str] = {}
        for name, node in self.nodes.splitting.items():
            if (earlier := first.setdefault(node.layer, name)) != name:
                rows, columns = self.nodes.states[earlier], self.nodes.states[name]
                same = [[0.0 if a.split == b.split else np.inf for b in columns] for a in rows]
                yield _tied((earlier, name), np.array(same))

    def _same_weights(self) -> Iterator[PricedFactor]:
        """Layers that share a weight cut it by the same axes."""
        for name, node in self.nodes.splitting.items():
            for other in sharers(self._graph, node):
                if name < other.name and other.name in self.nodes.splitting and may_cut(self._graph, node):
                    rows, columns = self.nodes.states[name], self.nodes.states[other.name]
                    same = [[0.0 if _channels(a) == _channels(b) else np.inf for b in columns] for a in rows]
                    yield _tied((name, other.name), np.array(same))


def _channels(state: NodeState) -> tuple[str, ...]:
    return state.split.channel if state.split else ()


def _tied(names: tuple[str, ...], table: Any) -> PricedFactor:
    return PricedFactor(Factor(names, table), Factor(names, np.zeros(table.shape)))
