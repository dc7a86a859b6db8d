"""Which values of a step are written to memory, and what is read in place of those that are not.

A compiler computes a pointwise value where it is read, unless an operator that it cannot look into reads it, or
computing it takes too many loads. What forward computes and backward reads is kept, with the exceptions that
`runtime/compiled/recomputed_values.py` makes: casts to a wider type, values that only pointwise operators read and that
can be computed from what is kept anyway, and the sign of a relu, for which a byte suffices.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from convmesh.plans.fused.value_graph import Op, StepValue, ValueGraph
from convmesh.plans.steps import bytes_each, bytes_of

MOST_OPERATORS, MOST_READ, SMALL = 16, 2, 16
"""As in `runtime/compiled/recomputed_values.py`."""

MOST_LOADS_SHARED, MOST_LOADS = 4, 8
"""Most loads from which a value is computed where it is read: by several readers, and by one; Inductor's defaults."""

Reads = dict[int, int]
"""Bytes that are read, by value."""
Loads = dict[tuple[int, int], int]
"""The same by value and view of it."""


class KeptValues:
    """Decides for each value of a graph."""

    def __init__(self, graph: ValueGraph) -> None:
        self._graph = graph
        self._written: dict[int, bool] = {}
        self._loads: dict[int, Loads] = {}

    def is_written(self, number: int) -> bool:
        """Whether a value is in memory after it was computed; inputs and weights are."""
        if number not in self._written:
            self._written[number] = self._decide(number)
        return self._written[number]

    def _decide(self, number: int) -> bool:
        value = self._graph.values[number]
        producer = value.producer
        if producer is None or producer.role != "pointwise" or not value.readers:
            return True
        here = [op for op in value.readers if op.is_backward == producer.is_backward]
        if any(op.role == "extern" or op.run != producer.run for op in here):
            return True
        if not producer.is_backward and value.late and number not in self.computed_again:
            return True
        return len(self.loads_of(producer)) > (MOST_LOADS_SHARED if len(here) > 1 else MOST_LOADS)

    def reads_of(self, op: Op) -> Reads:
        """What a kernel reads from memory to compute an operator; the signs of relus under negative numbers."""
        reads: Reads = {}
        for (number, _), size in self.loads_of(op).items():
            reads[number] = reads.get(number, 0) + size
        return {number: min(size, self._bytes_held(number)) for number, size in reads.items()}

    def _bytes_held(self, number: int) -> int:
        return self._graph.values[number].bytes_held if number >= 0 else self._graph.values[~number].elements

    def loads_of(self, op: Op) -> Loads:
        """The same, with each view of a value separate."""
        if op.number not in self._loads:
            self._loads[op.number] = self._loaded_by(op)
        return self._loads[op.number]

    def _loaded_by(self, op: Op) -> Loads:
        loads: Loads = {}
        for number, shape, view in zip(op.reads, op.work.inputs, op.views, strict=False):
            value = self._graph.values[number]
            if op.is_backward and number in self.signs:
                loads[~number, 0] = value.elements
            elif self._is_read(op, number):
                size = min(value.bytes_held, bytes_of(shape, value.dtype))
                loads[number, view] = max(loads.get((number, view), 0), size)
            else:
                assert value.producer is not None
                loads |= self.loads_of(value.producer)
        return loads

    def computed_for(self, op: Op) -> Iterator[Op]:
        """An operator, and those that are computed with it."""
        waiting, seen = [op], {op.number}
        while waiting:
            one = waiting.pop()
            yield one
            for number in one.reads:
                producer = self._graph.values[number].producer
                if producer is not None and producer.number not in seen and not self._is_read(one, number):
                    seen.add(producer.number)
                    waiting.append(producer)

    def _is_read(self, op: Op, number: int) -> bool:
        producer = self._graph.values[number].producer
        crosses = producer is not None and op.is_backward and not producer.is_backward
        return number not in self.computed_again if crosses else self.is_written(number)

    @cached_property
    def computed_again(self) -> frozenset[int]:
        """Values of forward that backward computes itself."""
        late = [n for n, v in enumerate(self._graph.values) if v.late and self._is_of_forward(v)]
        return frozenset(n for n in late if self._is_cheap_cast(n) or self._has_cheap_source(n))

    @cached_property
    def signs(self) -> frozenset[int]:
        """Results of relus of which backward reads nothing but the sign."""
        late = (n for n, v in enumerate(self._graph.values) if v.late and n not in self.computed_again)
        return frozenset(n for n in late if self._is_sign(n))

    def _is_sign(self, number: int) -> bool:
        value = self._graph.values[number]
        asks = all(op.work.op == "threshold_backward" and op.reads[1] == number for op in value.late)
        return asks and self._is_of_forward(value)

    @staticmethod
    def _is_of_forward(value: StepValue) -> bool:
        return value.producer is not None and value.producer.role == "pointwise" and not value.producer.is_backward

    def _is_cheap_cast(self, number: int) -> bool:
        value = self._graph.values[number]
        producer = value.producer
        if producer is None or producer.work.op != "_to_copy":
            return False
        return bytes_each(self._graph.values[producer.reads[0]].dtype) < bytes_each(value.dtype)

    def _has_cheap_source(self, number: int) -> bool:
        """Whether pointwise readers may compute it, from few operators on what is kept anyway."""
        value = self._graph.values[number]
        if any(op.role != "pointwise" for op in value.late):
            return False
        asked, sources, read = [number], set[int](), set[int]()
        while asked and len(sources) <= MOST_OPERATORS:
            one = asked.pop()
            producer = self._graph.values[one].producer
            if one != number and self._stays(one, value):
                read.add(one)
            elif producer is not None and producer.role == "pointwise":
                sources.add(one)
                asked += producer.reads
            else:
                return False
        size = sum(self._graph.values[one].bytes_held for one in read)
        return not asked and size <= MOST_READ * value.bytes_held

    def _stays(self, number: int, of: StepValue) -> bool:
        """Whether backward has a value regardless of what it recomputes, or can have it at little cost."""
        value = self._graph.values[number]
        if value.producer is None or value.elements * SMALL <= of.elements:
            return True
        return any(op.role != "pointwise" for op in value.late) and not self._is_cheap_cast(number)
