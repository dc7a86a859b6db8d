"""Cutting a network into pipeline stages: where cuts are allowed, and which make the slowest stage fastest."""

from __future__ import annotations

import difflib
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

from convmesh.errors import PlanError
from convmesh.graph import Graph, Node
from convmesh.plans.balance import BalanceLimits, Cost, balance
from convmesh.plans.steps import bytes_each

FLOATING = ("float64", "float32", "float16", "bfloat16")
"""Types that can cross between stages: they have gradients to send back."""


class StageGraph:
    """A network as a row of calls that can be cut into stages.

    A stage is a run of calls. A value that a later stage needs passes through all stages between; sizes and shapes are
    known beforehand and are not sent; parameters are read in the stage that uses them.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.calls = [node for node in graph.nodes if node.kind not in ("input", "output") and not _is_read(node)]
        self.place = {node.name: index for index, node in enumerate(self.calls)}

    @classmethod
    def of(cls, graph: Graph) -> StageGraph:
        """The stage graph of a network, cached with it."""
        row: StageGraph = graph.derived.get("stages") or graph.derived.setdefault("stages", cls(graph))
        return row

    @cached_property
    def obstacles(self) -> list[str | None]:
        """By place: why no stage may start there, or None."""
        obstacles: list[str | None] = [None] * len(self.calls)
        ranges = itertools.chain(self._poor_starts(), self._untransportable(), self._shared_weights())
        for first, last, why in ranges:
            for place in range(first + 1, min(last + 1, len(obstacles))):
                obstacles[place] = obstacles[place] or why
        if obstacles:
            obstacles[0] = "the first stage starts there anyway"
        return obstacles

    @cached_property
    def places(self) -> list[int]:
        """Where a stage after the first may start, so that every stage has a learning weight.

        One place between each two such weights: where the least crosses; on a tie, the last.
        """
        gaps = ([p for p in range(a + 1, b + 1) if self.obstacles[p] is None] for a, b in pairwise(self._learning))
        return [min(gap, key=lambda place: (self.bytes_crossing[place], -place)) for gap in gaps if gap]

    @cached_property
    def _learning(self) -> list[int]:
        """The places of calls with a learning weight."""
        return [place for place, node in enumerate(self.calls) if any(weight.learns for weight in node.weights)]

    def _poor_starts(self) -> Iterator[tuple[int, int, str]]:
        """A stage starts at a layer's first call, the only one that its name identifies, and with work."""
        seen: set[str] = set()
        for place, node in enumerate(self.calls):
            if node.layer in seen:
                yield place - 1, place, f"layer {node.layer!r} begins earlier"
            elif not node.outputs:
                yield place - 1, place, f"{node.layer!r} computes sizes only"
            seen.add(node.layer)

    def _untransportable(self) -> Iterator[tuple[int, int, str]]:
        for name, (made, last) in self._lifetimes.items():
            why = _obstacle(self.graph.node(name))
            if why and last > made:
                yield made, last, why

    def _shared_weights(self) -> Iterator[tuple[int, int, str]]:
        uses: dict[str, list[int]] = {}
        for place, node in enumerate(self.calls):
            for weight in node.weights:
                uses.setdefault(weight.name, []).append(place)
        for name, at in uses.items():
            if at[-1] > at[0]:
                users = f"{self.calls[at[0]].layer!r} and {self.calls[at[-1]].layer!r}"
                yield at[0], at[-1], f"weight {name!r} serves {users}, which must share a stage"

    @cached_property
    def _lifetimes(self) -> dict[str, tuple[int, int]]:
        """By value: where it is computed (-1: an input) and where it is last used (the end: an output)."""
        made = {node.name: -1 for node in self.graph.inputs} | self.place
        last = dict(made)
        for node in self.graph.nodes:
            at = len(self.calls) if node.kind == "output" else self.place.get(node.name)
            for name in node.inputs if at is not None else ():
                if name in last:
                    last[name] = max(last[name], at or 0)
        return {name: (place, last[name]) for name, place in made.items()}

    def crossing(self, place: int) -> tuple[str, ...]:
        """The tensors that a stage starting at `place` receives, each once, in the order in which they are computed."""
        alive = (name for name, (made, last) in self._lifetimes.items() if made < place <= last)
        return tuple(name for name in alive if self.graph.node(name).outputs)

    @cached_property
    def bytes_crossing(self) -> list[int]:
        """By place: bytes of the global (micro-)batch that a stage starting there receives."""
        change = [0] * (len(self.calls) + 2)
        for name, (made, last) in self._lifetimes.items():
            size = sum(value.elements * bytes_each(value.dtype) for value in self.graph.node(name).outputs)
            change[made + 1] += size
            change[last + 1 if last <= len(self.calls) else -1] -= size
        return list(itertools.accumulate(change))

    def bounds(self, starts: Sequence[str]) -> list[int]:
        """The places where stages begin, with 0 and the end, from the names of their first layers."""
        first = {node.layer: place for place, node in reversed(list(enumerate(self.calls)))}
        bounds = [0]
        for name in starts:
            if name not in first:
                near = difflib.get_close_matches(name, list(first), 1)
                hint = f"; the nearest is {near[0]!r}" if near else ""
                raise PlanError(f"`starts` names {name!r}, but the network has no such layer{hint}.")
            place = first[name]
            if place <= bounds[-1] and len(bounds) > 1:
                raise PlanError(f"`starts` names {name!r} after a layer that runs later; list them in order.")
            if obstacle := self.obstacles[place]:
                raise PlanError(f"no stage can start at {name!r}: {obstacle}{self._nearest(place)}.")
            bounds.append(place)
        bounds.append(len(self.calls))
        self._check_learning(bounds)
        return bounds

    def _check_learning(self, bounds: Sequence[int]) -> None:
        """Refuse a stage without learning weights: no optimiser can be made for it."""
        for begin, end in pairwise(bounds):
            if len(bounds) > 2 and bisect_left(self._learning, begin) == bisect_left(self._learning, end):
                raise PlanError(
                    f"the stage from {self.calls[begin].layer!r} to {self.calls[end - 1].layer!r} has no weight that "
                    f"learns, so its rank has nothing to optimise{self._nearest(begin or end)}."
                )

    def _nearest(self, place: int) -> str:
        near = min(self.places, key=lambda candidate: abs(candidate - place), default=None)
        return "" if near is None else f"; the nearest layer where one can start is {self.calls[near].layer!r}"

    def stage_weights(self, bounds: Sequence[int]) -> dict[str, int]:
        """The stage of every weight; unused weights belong to the first."""
        stages = {weight.name: 0 for weight in self.graph.weights}
        for stage, (begin, end) in enumerate(pairwise(bounds)):
            stages |= {weight.name: stage for node in self.calls[begin:end] for weight in node.weights}
        return stages


def _is_read(node: Node) -> bool:
    return node.kind == "attribute" and node.op == "attribute"


def _obstacle(node: Node) -> str | None:
    """Why a node's output cannot cross from one stage to the next."""
    if node.kind == "attribute":
        return f"{node.layer!r} computes a weight, which must be used in the same stage"
    if len(node.outputs) > 1:
        return f"{node.layer!r} has several outputs, which are taken apart after it"
    if node.outputs and node.outputs[0].dtype not in FLOATING:
        return f"{node.layer!r} outputs {node.outputs[0].dtype} values, which have no gradient to send back"
    return None


def cut_stages(
    graph: Graph,
    costs: Mapping[str, Cost],
    stages: int,
    in_flight: Sequence[int] | None = None,
    bytes_limit: int | None = None,
) -> tuple[str, ...]:
    """The first layers of the stages after the first, such that the slowest stage is fastest and the least crosses.

    `in_flight` gives the micro-batches whose activations each stage keeps at most; `bytes_limit` bounds the weights and
    activations of each stage.
    """
    row = StageGraph.of(graph)
    if stages > len(row.places) + 1:
        raise PlanError(
            f"{stages} stages are asked for, but this network can be cut into {len(row.places) + 1} at most, each "
            "with weights that learn; use fewer ranks on the pipe axis, or fewer stages a rank."
        )
    marks = [0, *row.places, len(row.calls)]
    pieces = [_total(costs, row.calls[a:b]) for a, b in pairwise(marks)]
    limits = BalanceLimits(tuple(in_flight or [1] * stages), bytes_limit)
    chosen = balance(pieces, stages, limits, [row.bytes_crossing[mark] for mark in marks[:-1]])
    return tuple(row.calls[marks[index]].layer for index in chosen)


def _total(costs: Mapping[str, Cost], nodes: Sequence[Node]) -> Cost:
    listed = [costs.get(node.name, Cost()) for node in nodes]
    return Cost(
        math.fsum(cost.seconds for cost in listed),
        sum(cost.bytes_weights for cost in listed),
        sum(cost.bytes_kept for cost in listed),
    )
