"""The flow of values through a whole step: from node to node forward, and back through their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from convmesh.plans.fused.flow import Role, Touch
from convmesh.plans.fused.peeled_bias import without_bias
from convmesh.plans.steps import Shape, Step, Work, bytes_of

if TYPE_CHECKING:
    from convmesh.plans.program import NodeProgram

TWICE = frozenset({"native_layer_norm_backward", "native_group_norm_backward"})
"""Operators that go through their operands once for the input's gradient, and in another order for the weights'."""

Place = tuple[str, int]
"""A node, and the index of one of its outputs."""


@dataclass(frozen=True, slots=True)
class Op:
    """One computation of a step."""

    number: int
    work: Work
    role: Role
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    is_backward: bool
    node: int
    place: int
    """Its place among the steps of its node."""
    run: int
    """Transfers and waits before it: a compiler sees only what comes between two of them."""
    views: tuple[int, ...] = ()
    in_rows: bool = False

    @property
    def elements(self) -> int:
        """Elements of the space that it iterates over: a reduction's operand, else its result."""
        shapes = self.work.inputs if self.role == "reduction" else self.work.outputs
        return max((math.prod(shape) for shape in shapes), default=1)


@dataclass(slots=True)
class StepValue:
    """What one computation makes, and others read."""

    shape: Shape
    dtype: str
    producer: Op | None = None
    readers: list[Op] = field(default_factory=list)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes_held(self) -> int:
        return bytes_of(self.shape, self.dtype)

    @property
    def late(self) -> list[Op]:
        """Its readers in backward."""
        return [op for op in self.readers if op.is_backward]


class ValueGraph:
    """All computations of a step in order, and all values."""

    def __init__(self, nodes: Sequence[NodeProgram]) -> None:
        self.ops: list[Op] = []
        self.values: list[StepValue] = []
        self._counts = {node.node: len(node.flow.outputs) or len(node.outputs) for node in nodes}
        self._run = 0
        self._made: dict[Place, int] = {}
        self._arrived: dict[Place, int] = {}
        locals_: list[dict[int, int]] = [{} for _ in nodes]
        for index, node in enumerate(nodes):
            self._forward(index, node, locals_[index])
        self._run += 1
        for index in reversed(range(len(nodes))):
            self._backward(index, nodes[index], locals_[index])

    def _forward(self, index: int, node: NodeProgram, known: dict[int, int]) -> None:
        for place, number in zip(self._places(node), node.flow.inputs, strict=False):
            if number is not None and place in self._made:
                known[number] = self._made[place]
        self._add(index, node.forward, node.flow.forward, known, is_backward=False)
        for at, number in enumerate(node.flow.outputs):
            if number is not None and number in known:
                self._made[node.node, at] = known[number]

    def _backward(self, index: int, node: NodeProgram, known: dict[int, int]) -> None:
        for place, number in enumerate(node.flow.arriving):
            if number is not None and (node.node, place) in self._arrived:
                known[number] = self._arrived[node.node, place]
        end = len(node.backward) - node.weight_steps - node.flow.sums
        sums = node.backward[end : end + node.flow.sums]
        steps = (*node.backward[:end], *node.backward[end + node.flow.sums :])
        self._add(index, steps, node.flow.backward, known, is_backward=True)
        self._pass_on(index, node, known, iter(enumerate(sums, end)))

    def _pass_on(self, index: int, node: NodeProgram, known: dict[int, int], sums: Iterator[tuple[int, Step]]) -> None:
        """Pass gradients to the nodes before, and add up those of several readers, as autograd does."""
        for place, number in zip(self._places(node), node.flow.leaving, strict=False):
            if number is None or number not in known:
                continue
            gradient = known[number]
            if place in self._arrived:
                at, step = next(sums, (0, None))
                if isinstance(step, Work):
                    gradient = self._summed(index, at, step, self._arrived[place], gradient)
            self._arrived[place] = gradient

    def _summed(self, index: int, at: int, work: Work, one: int, other: int) -> int:
        total = self._value(work.outputs[0], self.values[one].dtype)
        self._note(work, "pointwise", (one, other), (total,), True, index, at)
        return total

    def _places(self, node: NodeProgram) -> list[Place]:
        """The outputs that a node's inputs are; made-up ones where that is unknown."""
        counts = self._counts
        places = [(name, place) for name in node.sources for place in range(counts.get(name, 1))]
        count = len(node.flow.inputs)
        known = places if len(places) <= count else []
        return [*known, *((f"{node.node} from elsewhere", place) for place in range(len(known), count))]

    def _add(
        self,
        index: int,
        steps: Sequence[Step],
        touches: Mapping[int, Touch],
        known: dict[int, int],
        *,
        is_backward: bool,
    ) -> None:
        for place, step in enumerate(steps):
            if not isinstance(step, Work):
                self._run += 1
            elif (touch := touches.get(place)) is not None:
                self._touch(index, place, step, touch, known, is_backward)
            else:  # nobody noted what it reads
                self._note(step, "extern", (), (), is_backward, index, place)

    def _touch(
        self, index: int, place: int, work: Work, touch: Touch, known: dict[int, int], is_backward: bool
    ) -> None:
        for number, shape, dtype in zip(touch.reads, work.inputs, touch.dtypes, strict=False):
            if number not in known:
                known[number] = self._value(shape, dtype)
        reads = tuple([known[number] for number in touch.reads])
        made = touch.dtypes[len(touch.reads) :]
        for number, shape, dtype in zip(touch.writes, work.outputs, made, strict=True):
            known[number] = self._value(shape, dtype)
        writes = tuple([known[number] for number in touch.writes])
        if work.op in TWICE and len(writes) == 3:  # sums for each row, and for each channel
            self._note(work, "reduction", reads, writes[:1], is_backward, index, place, touch.views, touch.in_rows)
            self._note(work, "reduction", reads, writes[1:], is_backward, index, place, touch.views)
            return
        called = without_bias(work)
        if called is work:
            self._note(work, touch.role, reads, writes, is_backward, index, place, touch.views, touch.in_rows)
            return
        raw = self._value(work.outputs[0], made[0])
        self._note(called, "extern", reads[:2], (raw,), is_backward, index, place)
        added = Work("add", (work.outputs[0], work.inputs[2]), work.outputs, made[0], 0, 0, call=_order_of(called))
        self._note(added, "pointwise", (raw, reads[2]), writes, is_backward, index, place)

    def _value(self, shape: Shape, dtype: str) -> int:
        self.values.append(StepValue(shape, dtype))
        return len(self.values) - 1

    def _note(
        self,
        work: Work,
        role: Role,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        is_backward: bool,
        node: int,
        place: int,
        views: tuple[int, ...] = (),
        in_rows: bool = False,
    ) -> None:
        at = len(self.ops)
        seen = tuple([-1 - at if view < 0 else view for view in views]) or (0,) * len(reads)
        op = Op(at, work, role, reads, writes, is_backward, node, place, self._run, seen, in_rows)
        self.ops.append(op)
        for number in dict.fromkeys(reads):
            self.values[number].readers.append(op)
        for number in writes:
            self.values[number].producer = op


def _order_of(work: Work) -> str:
    """The part of a call that gives the memory order of its tensors."""
    return "last=1" if "last=1" in work.call else ""
