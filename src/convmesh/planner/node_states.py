"""The ways in which every node of a network may run on a mesh, each lowered alone for what its inputs may be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from convmesh.graph import Captured, Node
from convmesh.layout import Mesh
from convmesh.lowering.arrange import input_user
from convmesh.lowering.node_options import Single, SingleLowering, Value
from convmesh.oracle.search.layer_splits import splits_of
from convmesh.plans import Split, split_nodes

MOST_JOINED = 2
"""Inputs of a node whose layouts are combined freely; further inputs follow the first."""

Singles = dict[tuple[int, ...], Single]
"""A node's lowering, by the indices of its inputs' states and its own."""


@dataclass(frozen=True)
class NodeState:
    """One way in which a node may run: its split, if it takes one, and its output."""

    split: Split | None
    value: Value


@dataclass(frozen=True)
class _Origin:
    """A node's nearest ancestor, or itself, whose state is chosen; by each state of the node, those that lead to it."""

    name: str
    leading: tuple[frozenset[int], ...]

    def excludes(self, at: int, other: _Origin, there: int) -> bool:
        """Whether this node cannot be in state `at` while another is in state `there`."""
        return self.name == other.name and self.leading[at].isdisjoint(other.leading[there])


@dataclass
class NodeStates:
    """The nodes with tensors, the states of each, and its lowering for each combination of input states."""

    captured: Captured
    lowering: SingleLowering
    mesh: Mesh
    states: dict[str, list[NodeState]] = field(default_factory=dict)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    singles: dict[str, Singles] = field(default_factory=dict)
    origins: dict[str, _Origin] = field(default_factory=dict)
    _alike: dict[Any, tuple[list[NodeState], Singles]] = field(default_factory=dict)
    """States and lowerings by what distinguishes nodes: repeated blocks share them."""

    def explore(self) -> None:
        """Walk the graph with all states of the inputs."""
        self._splits = {n.layer: splits_of(n, self.captured.graph, self.mesh) for n in self.splitting.values()}
        for node in self.captured.graph.nodes:
            if node.kind == "input":
                self._input(node)
            elif node.kind != "output" and self.lowering.has_tensors(node.name):
                self._call(node)

    @cached_property
    def splitting(self) -> dict[str, Node]:
        """The nodes that take a split, by name."""
        return {node.name: node for node in split_nodes(self.captured.graph)}

    def _input(self, node: Node) -> None:
        user, values = input_user(self.captured.graph, node.name), [self.lowering.values[node.name]]
        if user:
            values = [self.lowering.input(node.name, user, split) for split in self._splits[user.layer]]
        self.states[node.name] = [NodeState(None, value) for value in dict.fromkeys(values)]
        self.sources[node.name], self.singles[node.name] = (), {}
        self.origins[node.name] = self._origin(node.name)

    def _call(self, node: Node) -> None:
        sources = tuple(dict.fromkeys(name for name in node.inputs if name in self.states))
        self.sources[node.name] = sources[:MOST_JOINED]
        options: list[Split | None] = [None]
        if node.name in self.splitting:
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
        """A node without a choice has its only input's, so that parts of one tensor are only combined consistently."""
        if len(self.sources[name]) != 1 or name in self.splitting:
            return _Origin(name, tuple(frozenset((at,)) for at in range(len(self.states[name]))))
        before = self.origins[self.sources[name][0]]
        leading: list[set[int]] = [set() for _ in self.states[name]]
        for source, state in self.singles[name]:
            leading[state] |= before.leading[source]
        return _Origin(before.name, tuple(map(frozenset, leading)))

    def _ties(self, sources: Sequence[str]) -> Any:
        """Which of the nodes share an origin, and how; None if all of their states go together."""
        origins = [self.origins[name] for name in sources[:MOST_JOINED]]
        names = [origin.name for origin in origins]
        return None if len({*names}) == len(names) else tuple(origin.leading for origin in origins)

    def _combined(self, name: str) -> Iterator[tuple[int, ...]]:
        """The combinations of states that a node's inputs may have."""
        origins = [self.origins[source] for source in self.sources[name]]
        for at in itertools.product(*(range(len(self.states[source])) for source in self.sources[name])):
            pairs = itertools.combinations(zip(origins, at, strict=True), 2)
            if not any(one.excludes(here, other, there) for (one, here), (other, there) in pairs):
                yield at

    def _explored(
        self, node: Node, sources: tuple[str, ...], options: Sequence[Split | None]
    ) -> tuple[list[NodeState], Singles]:
        """A node's states and lowerings for all states of its inputs; those that differ in splits alone are alike."""
        states: dict[NodeState, int] = {}
        singles: Singles = {}
        lowered: dict[Any, Single | None] = {}
        for at in self._combined(node.name):
            given = self._given(sources, at)
            for split in options:
                key = (*given.values(), split)
                if key not in lowered:
                    lowered[key] = self.lowering.single(node.name, given, split)
                if (single := lowered[key]) is not None:
                    state = states.setdefault(NodeState(split, single.value), len(states))
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
