"""The kernels that a compiler makes of a step's computations.

- What it cannot look into (convolutions, products) is called as it is.
- A pointwise value that has to be in memory is a kernel, and so is every reduction; what leads to them is computed
  inside. Those that run over the same space and read the same values become one kernel, which reads them once.
- Sums that run across memory, such as a norm's over samples and space, go through it in another order than pointwise
  values, and are complete only at their end: they get separate kernels, shared only with their own kind. Values as few
  as their results are computed at their end.
- Casts of weights before forward, and of their gradients after backward, are one call each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from convmesh.plans.fused.kept_values import KeptValues, Reads
from convmesh.plans.fused.value_graph import Op, ValueGraph


@dataclass(eq=False)
class Kernel:
    """Computations that run as one."""

    members: list[Op]
    elements: int
    reads: Reads = field(default_factory=dict)
    """Bytes by value."""
    writes: Reads = field(default_factory=dict)
    sums: set[int] = field(default_factory=set)
    """Values that are complete only at its end."""
    makers: dict[int, Kernel] = field(default_factory=dict)
    """Kernels that write what it reads, by identity."""
    waits_for: set[int] = field(default_factory=set)
    """All kernels before it, by identity."""
    computed: dict[int, Op] = field(default_factory=dict)
    """All computations inside, by number."""
    is_extern: bool = False
    is_cast: bool = False

    @cached_property
    def at(self) -> int:
        """The number of the computation in whose place it runs: its first, or that of the last kernel it waits for."""
        return max((self.members[0].number, *(maker.at for maker in self.makers.values())))

    @property
    def form(self) -> str:
        reductions = [op for op in self.members if op.role == "reduction"]
        if self.is_cast:
            return "copies"
        if not reductions:
            return "pointwise"
        if all(op.in_rows for op in reductions):
            return "rows"
        return "moments" if any(op.work.op.startswith("var") for op in reductions) else "sums"


class KernelMaker:
    """Goes through a step in order."""

    def __init__(self, graph: ValueGraph) -> None:
        self._graph, self._kept = graph, KeptValues(graph)
        self.kernels: list[Kernel] = []
        self._maker: dict[int, Kernel] = {}
        """By value: the kernel that writes it."""
        self._open: dict[tuple[int, int], list[Kernel]] = {}
        """By run and elements: kernels that more computations can join."""
        self._casts: dict[tuple[bool, int], Kernel] = {}

    def make(self) -> list[Kernel]:
        for op in self._graph.ops:
            if op.role == "extern":
                self._extern(op)
            elif op.role == "reduction" or any(map(self._kept.is_written, op.writes)):
                self._root(op)
        self._leave_out_passed_on()
        return sorted(self.kernels, key=lambda kernel: kernel.at)

    def _leave_out_passed_on(self) -> None:
        """Values that only the kernel computing them reads are not written."""
        read = {number for kernel in self.kernels for number in kernel.reads}
        for kernel in self.kernels:
            kernel.writes = {n: size for n, size in kernel.writes.items() if n in read or self._is_result(n)}

    def _is_result(self, number: int) -> bool:
        return number >= 0 and not self._graph.values[number].readers

    def _extern(self, op: Op) -> None:
        kernel = Kernel([op], op.elements, is_extern=True)
        self._take(kernel, op, self._kept.reads_of(op))
        self.kernels.append(kernel)

    def _root(self, op: Op) -> None:
        reads = self._kept.reads_of(op)
        kernel = self._cast(op) or self._fitting(op, reads)
        if kernel is None:
            kernel = Kernel([], op.elements)
            self.kernels.append(kernel)
            self._open.setdefault((op.run, op.elements), []).append(kernel)
        kernel.members.append(op)
        self._take(kernel, op, reads)

    def _take(self, kernel: Kernel, op: Op, reads: Reads) -> None:
        if not kernel.is_extern:
            kernel.computed |= {inner.number: inner for inner in self._kept.computed_for(op)}
        for number, size in reads.items():
            maker = self._maker.get(number)
            if maker is kernel:
                continue
            kernel.reads[number] = max(kernel.reads.get(number, 0), size)
            if maker is not None:
                kernel.makers[id(maker)] = maker
                kernel.waits_for |= {id(maker), *maker.waits_for}
        for number in op.writes:
            value = self._graph.values[number]
            self._maker[number] = kernel
            kernel.writes[number] = value.bytes_held
            if op.role == "reduction" and not op.in_rows:
                kernel.sums.add(number)
            if number in self._kept.signs:
                kernel.writes[~number] = value.elements
                if not self._is_read_whole(number):
                    del kernel.writes[number]

    def _is_read_whole(self, number: int) -> bool:
        """Whether a value whose sign is kept is also needed itself."""
        value = self._graph.values[number]
        early = [op for op in value.readers if not op.is_backward]
        return any(op.role == "extern" or (value.producer and op.run != value.producer.run) for op in early)

    def _cast(self, op: Op) -> Kernel | None:
        """The call that casts all weights, or all gradients, if this is one of its casts."""
        if op.work.op != "_to_copy" or op.elements <= 0:
            return None
        source, made = self._graph.values[op.reads[0]], self._graph.values[op.writes[0]]
        of_weight = source.producer is None and not op.is_backward and all(r.role == "extern" for r in made.readers)
        of_gradient = op.is_backward and not made.readers
        if not (of_weight or of_gradient):
            return None
        key = op.is_backward, op.run
        if key not in self._casts:
            self._casts[key] = Kernel([], 0, is_cast=True)
            self.kernels.append(self._casts[key])
        return self._casts[key]

    def _fitting(self, op: Op, reads: Reads) -> Kernel | None:
        makers = {id(self._maker[n]): self._maker[n] for n in reads if n in self._maker}
        tail = next((k for k in makers.values() if self._ends_with(k, op, makers)), None)
        if tail is not None:
            return tail
        for kernel in reversed(self._open.get((op.run, op.elements), [])):
            is_alike = bool(kernel.sums) == (op.role == "reduction" and not op.in_rows)
            if is_alike and self._shares(kernel, op, reads) and not self._waits(kernel, makers):
                return kernel
        return None

    def _ends_with(self, kernel: Kernel, op: Op, makers: dict[int, Kernel]) -> bool:
        """Whether few values can be computed at the end of a reduction."""
        if not kernel.sums or kernel.members[0].run != op.run or self._waits(kernel, makers):
            return False
        most = max(self._graph.values[number].elements for number in kernel.sums)
        return op.elements <= most < kernel.elements

    def _shares(self, kernel: Kernel, op: Op, reads: Reads) -> bool:
        """Whether both read or pass on a value as large as their space."""
        both = (n for n in reads if n in kernel.reads or n in kernel.writes)
        return any(self._elements(n) * 2 > op.elements for n in both)

    def _elements(self, number: int) -> int:
        return self._graph.values[number if number >= 0 else ~number].elements

    @staticmethod
    def _waits(kernel: Kernel, makers: dict[int, Kernel]) -> bool:
        """Whether something that is read has to wait for the kernel to end."""
        return any(id(kernel) in maker.waits_for for maker in makers.values() if maker is not kernel)
