"""Mixing strategies: for every layer the split that costs least, given those of its neighbours.

Every node is lowered alone and priced for each layout that its inputs may have; the oracle's elimination chooses among
all combinations. It does not see overlap, so its plans are simulated in full afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from convmesh.graph import Captured, Node
from convmesh.layout import Mesh
from convmesh.lowering.arrange import input_user
from convmesh.lowering.node_options import Single, SingleLowering, Value
from convmesh.oracle import Assumptions
from convmesh.oracle.memory.peak import bytes_of_libraries
from convmesh.oracle.search.bounded import PricedFactor, minimise_within
from convmesh.oracle.search.elimination import Choices, Factor
from convmesh.oracle.search.layer_splits import splits_of
from convmesh.planner.node_prices import NodePrices
from convmesh.planner.predicting import representatives
from convmesh.plans import Plan, Split, split_nodes
from convmesh.plans.shared_weights import may_cut, sharers
from convmesh.system import System

SHARES_EXPOSED = (1.0, 0.2)
"""Shares of gradient sums that backward may leave exposed; there is a best mix for each."""

MOST_JOINED = 2
"""Inputs of a node whose layouts are combined freely; further inputs follow the first."""

Singles = dict[tuple[int, ...], Single]


def mixes_on(
    captured: Captured, mesh: Mesh, system: System, assumptions: Assumptions, empty: Plan
) -> Iterator[dict[str, Split]]:
    """Splits by layer that cost least on a mesh within the devices' memory; `empty` is a plan without cuts."""
    if all(len(splits_of(node, captured.graph, mesh)) == 1 for node in split_nodes(captured.graph)):
        return  # nothing to choose
    network = _Network(captured, SingleLowering(captured, empty, representatives(mesh)[0], system.torch_device), mesh)
    network.explore()
    prices = NodePrices(system, mesh, assumptions, network.lowering.weights)
    libraries = bytes_of_libraries(mesh.size if system.torch_device == "cuda" else 0)
    bound = max(0.0, float(system.device.bytes_memory) - libraries)
    for share in SHARES_EXPOSED:
        priced = [*network.priced(prices, share)]
        best = minimise_within(priced, bound, network.start())
        if best is not None:
            yield network.chosen(best.choices)


@dataclass(frozen=True)
class _State:
    """One way in which a node may run: its split, if it takes one, and its output."""

    split: Split | None
    value: Value


@dataclass(frozen=True)
class _Origin:
    """The nearest node up to one whose state is chosen: by each state of the one, those that lead to it."""

    name: str
    leading: tuple[frozenset[int], ...]

    def excludes(self, at: int, other: _Origin, there: int) -> bool:
        """Whether this node cannot be in one state while another is in its own."""
        return self.name == other.name and self.leading[at].isdisjoint(other.leading[there])


@dataclass
class _Network:
    """The nodes with tensors, the states of each, and its lowering for each combination of input states."""

    captured: Captured
    lowering: SingleLowering
    mesh: Mesh
    states: dict[str, list[_State]] = field(default_factory=dict)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    singles: dict[str, Singles] = field(default_factory=dict)
    """By node: its lowering, by the indices of its inputs' states and its own."""
    origins: dict[str, _Origin] = field(default_factory=dict)
    _alike: dict[Any, tuple[list[_State], Singles]] = field(default_factory=dict)
    """States and lowerings by what tells nodes apart: blocks that repeat have the same."""

    def explore(self) -> None:
        """Walk the graph with all states of the inputs."""
        self._splits = {n.layer: splits_of(n, self.captured.graph, self.mesh) for n in self._split_nodes.values()}
        for node in self.captured.graph.nodes:
            if node.kind == "input":
                self._input(node)
            elif node.kind != "output" and self.lowering.has_tensors(node.name):
                self._call(node)

    @cached_property
    def _split_nodes(self) -> dict[str, Node]:
        return {node.name: node for node in split_nodes(self.captured.graph)}

    def _input(self, node: Node) -> None:
        user, values = input_user(self.captured.graph, node.name), [self.lowering.values[node.name]]
        if user:
            values = [self.lowering.input(node.name, user, split) for split in self._splits[user.layer]]
        self.states[node.name] = [_State(None, value) for value in dict.fromkeys(values)]
        self.sources[node.name], self.singles[node.name] = (), {}
        self.origins[node.name] = self._origin(node.name)

    def _call(self, node: Node) -> None:
        sources = tuple(dict.fromkeys(name for name in node.inputs if name in self.states))
        self.sources[node.name] = sources[:MOST_JOINED]
        options: list[Split | None] = [None]
        if node.name in self._split_nodes:
            options = [*self._splits[node.layer]]
        likeness = self.lowering.likeness(node.name, sources, options)
        key = None if likeness is None else (likeness, self._ties(sources), *map(self._values, sources))
        known = None if key is None else self._alike.get(key)
        if known is None:
            known = self._explored(node, sources, options)
            if key is not None:
                self._alike[key] = known
        self.states[node.name], self.singles[node.name] = known
        self.origins[node.name] = self._origin(node.name)

    def _values(self, name: str) -> tuple[Value, ...]:
        return tuple(state.value for state in self.states[name])

    def _origin(self, name: str) -> _Origin:
        """Of a node without a choice, that of its only input; parts of one tensor are then never combined otherwise."""
        if len(self.sources[name]) != 1 or name in self._split_nodes:
            return _Origin(name, tuple(frozenset((at,)) for at in range(len(self.states[name]))))
        before = self.origins[self.sources[name][0]]
        leading: list[set[int]] = [set() for _ in self.states[name]]
        for source, state in self.singles[name]:
            leading[state] |= before.leading[source]
        return _Origin(before.name, tuple(map(frozenset, leading)))

    def _ties(self, sources: Sequence[str]) -> Any:
        """Which of some nodes have one origin, and how; None if all states of each go together."""
        origins = [self.origins[name] for name in sources[:MOST_JOINED]]
        names = [origin.name for origin in origins]
        return None if len({*names}) == len(names) else tuple(origin.leading for origin in origins)

    def _combined(self, name: str) -> Iterator[tuple[int, ...]]:
        """The states that a node's inputs may have at a time."""
        origins = [self.origins[source] for source in self.sources[name]]
        for at in itertools.product(*(range(len(self.states[source])) for source in self.sources[name])):
            pairs = itertools.combinations(zip(origins, at, strict=True), 2)
            if not any(one.excludes(here, other, there) for (one, here), (other, there) in pairs):
                yield at

    def _explored(
        self, node: Node, sources: tuple[str, ...], options: Sequence[Split | None]
    ) -> tuple[list[_State], Singles]:
        """A node's states and lowerings for all states of its inputs; those that differ in splits alone are alike."""
        states: dict[_State, int] = {}
        singles: Singles = {}
        lowered: dict[Any, Single | None] = {}
        for at in self._combined(node.name):
            given = self._given(sources, at)
            for split in options:
                key = (*given.values(), split)
                if key not in lowered:
                    lowered[key] = self.lowering.single(node.name, given, split)
                if (single := lowered[key]) is not None:
                    state = states.setdefault(_State(split, single.value), len(states))
                    singles[*at, state] = single
        return list(states), singles

    def _given(self, sources: tuple[str, ...], at: tuple[int, ...]) -> dict[str, Value]:
        given = {name: self.states[name][index].value for name, index in zip(sources, at, strict=False)}
        for name in sources[MOST_JOINED:]:
            given[name] = self._like(name, given[sources[0]])
        return given

    def _like(self, name: str, lead: Value) -> Value:
        """The state of another input that is cut by the same axes as the first."""
        wanted = getattr(getattr(lead, "layout", None), "axes", ())
        alike = (s.value for s in self.states[name] if getattr(getattr(s.value, "layout", None), "axes", ()) == wanted)
        return next(alike, self.states[name][0].value)

    def start(self) -> Choices:
        """The first split of every layer, which is allowed."""
        choices: Choices = {}
        for name in self.states:
            before = tuple(choices[source] for source in self.sources[name])
            firsts = [at[-1] for at in self.singles[name] if at[:-1] == before]
            choices[name] = min(firsts, default=0)
        return choices

    def chosen(self, choices: Mapping[Any, int]) -> dict[str, Split]:
        """The splits of the chosen states."""
        taken = ((self.captured.graph.node(n).layer, states[choices[n]].split) for n, states in self.states.items())
        return {layer: split for layer, split in taken if split is not None}

    def priced(self, prices: NodePrices, share: float) -> Iterator[PricedFactor]:
        """Tables of seconds and bytes for all nodes, and constraints between states."""
        tables: dict[int, tuple[Any, Any]] = {}
        for name, states in self.states.items():
            if self.sources[name] or self.singles[name]:
                singles = self.singles[name]
                if id(singles) not in tables:
                    tables[id(singles)] = self._tables(name, prices, share)
                seconds, use = tables[id(singles)]
                names = (*self.sources[name], name)
                yield PricedFactor(Factor(names, seconds), Factor(names, use))
            else:
                yield _tied((name,), np.zeros(len(states)))
        for node in self.captured.graph.inputs:
            if user := input_user(self.captured.graph, node.name):
                yield self._as_user_wants(node.name, user)
        yield from self._same_layers()
        yield from self._same_weights()

    def _tables(self, name: str, prices: NodePrices, share: float) -> tuple[Any, Any]:
        """Seconds and bytes of a node for all states of its inputs and its own."""
        shape = [len(self.states[source]) for source in (*self.sources[name], name)]
        seconds, use = np.full(shape, np.inf), np.zeros(shape)
        priced: dict[int, tuple[float, float]] = {}
        for at, single in self.singles[name].items():
            if id(single) not in priced:
                priced[id(single)] = prices.seconds(single, share), prices.bytes(single)
            seconds[at], use[at] = priced[id(single)]
        return seconds, use

    def _as_user_wants(self, name: str, user: Node) -> PricedFactor:
        table = np.full((len(self.states[name]), len(self.states[user.name])), np.inf)
        for at, state in enumerate(self.states[user.name]):
            wanted = self.lowering.input(name, user, state.split or Split())
            table[[s.value == wanted for s in self.states[name]], at] = 0
        return _tied((name, user.name), table)

    def _same_layers(self) -> Iterator[PricedFactor]:
        """A layer that runs several times has one split."""
        first: dict[str, str] = {}
        for name, node in self._split_nodes.items():
            if (earlier := first.setdefault(node.layer, name)) != name:
                rows, columns = self.states[earlier], self.states[name]
                same = [[0.0 if a.split == b.split else np.inf for b in columns] for a in rows]
                yield _tied((earlier, name), np.array(same))

    def _same_weights(self) -> Iterator[PricedFactor]:
        """Layers that share a weight cut it by the same axes."""
        for name, node in self._split_nodes.items():
            for other in sharers(self.captured.graph, node):
                if name < other.name and other.name in self._split_nodes and may_cut(self.captured.graph, node):
                    rows, columns = self.states[name], self.states[other.name]
                    same = [[0.0 if _channels(a) == _channels(b) else np.inf for b in columns] for a in rows]
                    yield _tied((name, other.name), np.array(same))


def _channels(state: _State) -> tuple[str, ...]:
    return state.split.channel if state.split else ()


def _tied(names: tuple[str, ...], table: Any) -> PricedFactor:
    return PricedFactor(Factor(names, table), Factor(names, np.zeros(table.shape)))
