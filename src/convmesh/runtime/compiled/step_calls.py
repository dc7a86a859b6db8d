"""A traced step cut into calls: runs of local operators, and between them transfers in the order of the program."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from convmesh.dist import OpenMesh
from convmesh.dist.launching import Flying, Posting, Tensors, is_post, is_wait
from convmesh.errors import UnsupportedError
from convmesh.private_torch.graph_sources import forget_source_of
from convmesh.private_torch.tracing import returns_views
from convmesh.runtime.compiled.joined_casts import cast_all, join_gradient_casts, join_weight_casts
from convmesh.runtime.compiled.layer_tags import layers_of
from convmesh.runtime.compiled.replay_listener import replay_listener
from convmesh.runtime.compiled.step_compiler import Run
from convmesh.runtime.compiled.traced_graph import TracedGraph
from convmesh.runtime.graph_regions import region

Values = dict[int, Any]
"""The step's values that are still needed, by place."""

Order = Sequence[Sequence[int]]
"""Gradients, by number, in the groups in which they are summed over ranks."""

Compile = Callable[[fx.GraphModule], Run]


@dataclass(frozen=True)
class StepCall:
    """One call of a replay: it reads some values, writes others, and is the last to read those it `frees`."""

    run: Run
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...] = ()
    layer: str = ""
    """The layers that it computes or sends for."""
    phase: str = "forward"


def replay(calls: Iterable[StepCall], values: Values) -> None:
    """Make the calls in order."""
    listener = replay_listener()
    for call in calls:
        if listener is not None:
            listener.enter(call.layer, call.phase)
        arguments = [values[place] for place in call.reads]
        for place in call.frees:
            del values[place]
        values.update(zip(call.writes, call.run(arguments), strict=True))
        if listener is not None:
            listener.leave()


@dataclass(frozen=True)
class BackwardPiece:
    """A part of backward after which the gradients of some weights are ready."""

    calls: list[StepCall]
    gradients: tuple[int, ...]
    """Which of the step's gradients, by number."""
    frees: tuple[int, ...]
    """Places of gradients that nothing reads any more, once they are delivered."""


@dataclass(frozen=True)
class StepCalls:
    """The step in calls: forward, and backward in pieces."""

    forward: list[StepCall]
    pieces: list[BackwardPiece]
    inputs: tuple[int, ...]
    """Places of the seeds, the held tensors and the batch."""
    types: tuple[torch.dtype, ...]
    """The types in which they are read; a batch may arrive in others."""
    tangents: tuple[int, ...]
    """Places of the gradients that backward begins with."""
    results: tuple[int, ...]
    """Places of what forward computes: in a step, the loss, whether outputs are finite, and the label notes."""
    gradients: tuple[int, ...]


def whole_segments(calls: StepCalls) -> list[tuple[int, ...]]:
    """Pieces of backward, by number, in groups that end with no transfer under way: what a graph can hold."""
    under_way = _under_way(calls.forward, set())
    if under_way:
        raise UnsupportedError("a transfer is under way between forward and backward")
    segments: list[tuple[int, ...]] = []
    opened: tuple[int, ...] = ()
    for number, piece in enumerate(calls.pieces):
        under_way = _under_way(piece.calls, under_way)
        opened = (*opened, number)
        if not under_way:
            segments, opened = [*segments, opened], ()
    return segments


def agreed_segments(calls: StepCalls, mesh: OpenMesh) -> list[tuple[int, ...]]:
    """`whole_segments`, which must be the same on all ranks; every rank calls this, and all raise if they differ.

    Sums of gradients are posted between two graphs. If one rank posted a sum before transfers that another posts first,
    and waited for it, as captures do, the two would wait for each other.
    """
    segments, problem = list[tuple[int, ...]](), None
    try:
        segments = whole_segments(calls)
    except UnsupportedError as error:
        problem = str(error)
    mesh.agree("the graphs of a compiled step", str(segments), problem)
    return segments


def _under_way(calls: Iterable[StepCall], before: set[int]) -> set[int]:
    """Places of the transfers that are posted and not yet waited for, after some calls."""
    pending = set(before)
    for call in calls:
        if isinstance(call.run, Posts):
            pending.update(call.writes)
        elif isinstance(call.run, Waits):
            pending.difference_update(call.reads)
    return pending


def cut_step(traced: TracedGraph, order: Order, compiler: Compile) -> StepCalls:
    """Cut backward after the last gradient of each group in `order`, so that its sum over ranks can start there."""
    join_weight_casts(traced.module.graph, traced.tangents)
    join_gradient_casts(traced.module.graph, traced.gradients, {i for group in order for i in group})
    cutter = _Cutter(traced, compiler)
    return cutter.cut(*cutter.ends(order))


def cut_before(traced: TracedGraph, second: Callable[[fx.Node], bool], first: int, compiler: Compile) -> StepCalls:
    """Cut backward in two: before the first node of the `second` part, where the `first` gradients are ready.

    Without such a node it is one piece.
    """
    join_weight_casts(traced.module.graph, traced.tangents)
    cutter = _Cutter(traced, compiler)
    return cutter.cut(*cutter.halves(second, first))


class _Cutter:
    def __init__(self, traced: TracedGraph, compiler: Compile) -> None:
        self._traced, self._compiler = traced, compiler
        graph = traced.module.graph
        self._nodes = [n for n in graph.nodes if n.op == "call_function"]
        given = graph.find_nodes(op="placeholder")
        self._tangents, self._inputs = given[: traced.tangents], given[traced.tangents :]
        (output,) = graph.find_nodes(op="output")
        self._results: list[fx.Node] = list(output.args[0])
        self._border = len(self._results) - traced.gradients

    def cut(self, ends: list[int], groups: list[tuple[int, ...]]) -> StepCalls:
        """Cut backward at `ends`, where the gradients of `groups` are ready."""
        results, border = self._results, self._border
        parts = [_runs(self._nodes[a:b]) for a, b in pairwise([0, self._backward_begins(), *ends])]
        _repeat_views([run for part in parts for run in part])
        places = {node: place for place, node in enumerate(self._traced.module.graph.nodes)}
        calls = [[_named(self._call(run, places), run, part is parts[0]) for run in part] for part in parts]
        kept = [places[n] for n in results]
        freeing, ended = _freeing(calls, kept[:border], [[kept[border + i] for i in group] for group in groups])
        return StepCalls(
            forward=freeing[0],
            pieces=[BackwardPiece(*piece) for piece in zip(freeing[1:], groups, ended[1:], strict=True)],
            inputs=tuple(places[n] for n in self._inputs),
            types=tuple(n.meta["val"].dtype for n in self._inputs),
            tangents=tuple(places[n] for n in self._tangents),
            results=tuple(kept[:border]),
            gradients=tuple(kept[border:]),
        )

    def _backward_begins(self) -> int:
        """The first operator that reads one of the gradients given to backward."""
        numbers = {node: number for number, node in enumerate(self._nodes)}
        readers = [numbers[n] for tangent in self._tangents for n in tangent.users if n in numbers]
        return min(readers, default=len(self._nodes))

    def halves(self, second: Callable[[fx.Node], bool], first: int) -> tuple[list[int], list[tuple[int, ...]]]:
        """Where the two parts of backward end, and the gradients that are ready there."""
        count, end = self._traced.gradients, len(self._nodes)
        if not count:
            return [], []
        border = next((place for place, node in enumerate(self._nodes) if second(node)), end)
        if border == end or not 0 < first < count:
            return [end], [tuple(range(count))]
        return [border, end], [tuple(range(first)), tuple(range(first, count))]

    def ends(self, order: Order) -> tuple[list[int], list[tuple[int, ...]]]:
        """Where the pieces of backward end, and the gradients that are ready there."""
        gradients = self._results[self._border :]
        if not gradients:
            return [], []
        numbers = {node: number for number, node in enumerate(self._nodes)}
        begin = self._backward_begins()
        ready = [max(begin, numbers.get(node, 0) + 1) for node in gradients]
        ends = sorted({max(ready[i] for i in group) for group in order if group} - {len(self._nodes)})
        ends.append(len(self._nodes))
        groups: list[list[int]] = [[] for _ in ends]
        for i, place in enumerate(ready):
            groups[next(k for k, end in enumerate(ends) if place <= end)].append(i)
        filled = [(end, tuple(group)) for end, group in zip(ends, groups, strict=True) if group]
        last = (len(self._nodes), filled[-1][1])
        return [end for end, _ in (*filled[:-1], last)], [group for _, group in (*filled[:-1], last)]

    def _call(self, run: list[fx.Node], places: dict[fx.Node, int]) -> StepCall:
        first: Any = run[0]
        if is_post(first.target):
            sent, number = first.args
            return StepCall(Posts(self._traced.postings[number]), tuple(places[n] for n in sent), (places[first],))
        unpacking: list[Any] = run[1:]
        if is_wait(first.target):
            items = {node.args[1]: places[node] for node in unpacking}
            posted = self._posted[first.args[1]]
            return StepCall(Waits(tuple(items)), (places[posted],), tuple(items.values()))
        if first.target is cast_all:
            reads, made = tuple(places[n] for n in first.args[0]), tuple(places[n] for n in unpacking)
            return StepCall(partial(cast_all, dtypes=first.args[1]), reads, made)
        part = region(self._constants, run)
        part.module.graph.eliminate_dead_code()  # views that other runs repeat
        part.module.recompile()
        forget_source_of(part.module)
        reads = tuple(places[n] for n in part.inputs)
        return StepCall(self._compiler(part.module), reads, tuple(places[n] for n in part.outputs))

    @property
    def _posted(self) -> dict[Any, fx.Node]:
        return {node.args[1]: node for node in self._nodes if is_post(node.target)}

    @property
    def _constants(self) -> dict[str, Any]:
        module = self._traced.module
        return {str(n.target): getattr(module, str(n.target)) for n in module.graph.find_nodes(op="get_attr")}


def _named(call: StepCall, run: Sequence[fx.Node], is_forward: bool) -> StepCall:
    return replace(call, layer=layers_of(run), phase="forward" if is_forward else "backward")


@dataclass(frozen=True)
class Posts:
    posting: Posting

    def __call__(self, sent: Tensors) -> list[Flying]:
        return [self.posting.run(sent)]


@dataclass(frozen=True)
class Waits:
    items: tuple[int, ...]

    def __call__(self, flying: list[Flying]) -> Tensors:
        arrived = flying[0].wait()
        return [arrived[item] for item in self.items]


def _runs(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Separate calls, each with the nodes that unpack it, and the runs of local operators between them."""
    runs: list[list[fx.Node]] = []
    is_open = False
    for node in nodes:
        if _is_apart(node):
            runs.append([node])
            is_open = False
        elif _is_unpacking(node, is_wait) or _is_unpacking(node, _casts_all):
            next(run for run in reversed(runs) if run[0] is node.args[0]).append(node)
        elif not _is_unpacking(node, is_post):  # only waits read what was posted
            if not is_open:
                runs.append([])
            runs[-1].append(node)
            is_open = True
    return runs


def _is_apart(node: fx.Node) -> bool:
    """Whether a node is a separate call, which no compiler sees."""
    return is_post(node.target) or is_wait(node.target) or _casts_all(node.target)


def _casts_all(target: Any) -> bool:
    return target is cast_all


def _is_unpacking(node: fx.Node, asked: Callable[[Any], bool]) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and asked(source.target)


def _repeat_views(runs: list[list[fx.Node]]) -> None:
    """Let every run make the views that it reads: what passes between runs is never a view."""
    for run in runs:
        if _is_apart(run[0]):
            continue
        inside = {*run}
        copies: dict[fx.Node, fx.Node] = {}
        for node in list(run):
            for source in node.all_input_nodes:
                if source not in inside and _is_view(source):
                    node.replace_input_with(source, _copied(source, inside, copies, run, node))


def _copied(
    view: fx.Node, inside: set[fx.Node], copies: dict[fx.Node, fx.Node], run: list[fx.Node], before: fx.Node
) -> fx.Node:
    if view in copies:
        return copies[view]
    sources = {
        s: _copied(s, inside, copies, run, before) for s in view.all_input_nodes if s not in inside and _is_view(s)
    }
    with view.graph.inserting_before(before):
        copies[view] = view.graph.node_copy(view, lambda n: sources.get(n, n))
    inside.add(copies[view])
    run.insert(run.index(before), copies[view])
    return copies[view]


def _is_view(node: fx.Node) -> bool:
    """Whether a node's value shares memory with what it reads, and the node writes nothing."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_view(source)
    return returns_views(node.target)


def _freeing(
    parts: list[list[StepCall]], results: Sequence[int], gradients: Sequence[Sequence[int]]
) -> tuple[list[list[StepCall]], list[tuple[int, ...]]]:
    """The same calls, each freeing what it is the last to read; and for each part the gradients to free at its end."""
    kept, freed, ended = {*results}, [], []
    for part, ready in zip(reversed(parts), reversed([(), *gradients]), strict=True):
        ended.append(tuple(place for place in dict.fromkeys(ready) if place not in kept))
        kept.update(ready)
        listed: list[StepCall] = []
        for call in reversed(part):
            frees = tuple(dict.fromkeys(place for place in call.reads if place not in kept))
            kept.update(frees)
            listed.append(replace(call, frees=frees))
        freed.append(listed[::-1])
    return freed[::-1], ended[::-1]
