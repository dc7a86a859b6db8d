"""Shrinks what a step keeps from forward to backward, at little cost, for a compiler that fuses.

- Casts to a wider type, of which autocast makes one for every layer, are made again.
- A value that backward reads only in elementwise operators is recomputed if its sources are kept anyway: inside the
  kernel that reads it, so it is never written to memory.
- If backward needs only the sign of a relu's output, one byte per value is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from convmesh.private_torch.tracing import is_cast, is_elementwise, returns_views, writes_to

MOST_OPERATORS = 16
"""Operators that recompute one value, at most."""

MOST_READ = 2
"""Bytes read to recompute a value, at most, for each byte of it."""

SMALL = 16
"""A value with this many times fewer elements, such as a mean, may be kept so that another need not be."""

_RELU_BACKWARD = torch.ops.aten.threshold_backward.default


def recompute_values(graph: fx.Graph, *tangents: fx.Node) -> None:
    """Let backward, which begins with the first reader of `tangents`, recompute what is cheap."""
    step = _Values(graph, tangents)
    for node in step.kept:
        operators = [node] if step.is_cheap_cast(node) else step.elementwise_source(node)
        if operators:
            step.repeat([*operators, *step.forward_views_of(node)])
        elif readers := step.readers_of_its_sign(node):
            _keep_sign(node, readers)


class _Values:
    """A step's traced graph: the values of forward, and which of them backward reads."""

    def __init__(self, graph: fx.Graph, tangents: Sequence[fx.Node]) -> None:
        self._order = {node: number for number, node in enumerate(graph.nodes)}
        readers = [self._order[reader] for tangent in tangents for reader in tangent.users]
        self._begin = min(readers, default=len(self._order))
        self._written = {_memory_of(node) for each in graph.nodes for node in writes_to(each)}

    @cached_property
    def kept(self) -> list[fx.Node]:
        """Values, not views, that forward computes and backward reads."""
        return [n for n in self._order if self._is_forward(n) and not _is_view(n) and any(self._late_readers(n))]

    def is_cheap_cast(self, node: fx.Node) -> bool:
        """Whether a value is a cast whose source takes less memory."""
        if not is_cast(node.target) or self._changes(node):
            return False
        source: Any = node.args[0]
        cast, value = node.meta["val"], source.meta["val"]
        if cast.device != value.device or self._changes(source):
            return False
        return bool(value.element_size() < cast.element_size())

    def readers_of_its_sign(self, node: fx.Node) -> list[fx.Node]:
        """Backward's readers of a value, if all of them only ask whether it is positive."""
        readers = list(self._late_readers(node))
        asked = all(r.target is _RELU_BACKWARD and r.args[1:] == (node, 0) and r.args[0] is not node for r in readers)
        return readers if asked and not self._changes(node) else []

    def elementwise_source(self, node: fx.Node) -> list[fx.Node]:
        """The operators that compute, from values kept anyway, a value that backward reads element by element."""
        if not all(is_elementwise(reader.target) for reader in self._late_readers(node)):
            return []
        sources: dict[fx.Node, None] = {}
        read: dict[fx.Node, None] = {}
        asked = [node]
        while asked and len(sources) <= MOST_OPERATORS:
            one = asked.pop()
            if one is not node and self._stays(one, node):
                read[_memory_of(one)] = None
            elif is_elementwise(one.target) or _is_view(one):
                sources[one] = None
                asked += one.all_input_nodes
            else:
                return []
        bytes_read = sum(value.meta["val"].nbytes for value in read)
        is_cheap = not asked and bytes_read <= MOST_READ * node.meta["val"].nbytes
        return [*sources] if is_cheap and not any(map(self._changes, (*sources, *read))) else []

    def _stays(self, node: fx.Node, of: fx.Node) -> bool:
        """Whether backward has a value regardless of what is recomputed, or may have it at little cost."""
        memory = _memory_of(node)
        if memory.op != "call_function":
            return True
        value = memory.meta["val"]
        if isinstance(value, torch.Tensor) and value.numel() * SMALL <= of.meta["val"].numel():
            return True
        is_read = any(not is_elementwise(reader.target) for reader in self._late_readers(memory))
        return is_read and not self.is_cheap_cast(memory)

    def forward_views_of(self, node: fx.Node) -> Iterator[fx.Node]:
        """Forward's views of a value; backward reads some of them."""
        return filter(self._is_forward, _views_of(node))

    def repeat(self, nodes: list[fx.Node]) -> None:
        """Compute nodes again before backward first reads one of them, for all readers in backward."""
        late = {reader for node in nodes for reader in node.users if self._is_late(reader)}
        first = min(late, key=self._order.__getitem__)
        again: dict[fx.Node, fx.Node] = {}
        for node in sorted(nodes, key=self._order.__getitem__):
            with node.graph.inserting_before(first):
                again[node] = node.graph.node_copy(node, lambda source: again.get(source, source))
        for reader in late:
            for node in nodes:
                reader.replace_input_with(node, again[node])

    def _late_readers(self, node: fx.Node) -> Iterator[fx.Node]:
        for one in (node, *_views_of(node)):
            yield from (reader for reader in one.users if self._is_late(reader) and not _is_view(reader))

    def _changes(self, node: fx.Node) -> bool:
        """Whether something writes to a value's memory: recomputed later, it would differ."""
        return _memory_of(node) in self._written

    def _is_forward(self, node: fx.Node) -> bool:
        return node.op == "call_function" and self._order.get(node, self._begin) < self._begin

    def _is_late(self, node: fx.Node) -> bool:
        return node.op == "call_function" and self._order.get(node, -1) >= self._begin


def _keep_sign(node: fx.Node, readers: list[fx.Node]) -> None:
    with node.graph.inserting_after(node):
        blocked = _called(node.graph, torch.ops.aten.le.Scalar, node, 0)
    for reader in readers:
        with node.graph.inserting_before(reader):
            zero = _called(node.graph, torch.ops.aten.new_zeros.default, reader.args[0], ())
            passed = _called(node.graph, torch.ops.aten.where.self, blocked, zero, reader.args[0])
        reader.replace_all_uses_with(passed)
        node.graph.erase_node(reader)


def _called(graph: fx.Graph, operator: Any, *args: Any) -> fx.Node:
    """A new node that carries its value's shape and format, as traced nodes do."""
    made = graph.call_function(operator, args)
    made.meta["val"] = operator(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args))
    return made


def _views_of(node: fx.Node) -> Iterator[fx.Node]:
    for reader in filter(_is_view, node.users):
        yield reader
        yield from _views_of(reader)


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and returns_views(node.target)


def _memory_of(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node
