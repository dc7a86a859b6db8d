"""How values flow through the computations of a node: what each of them reads and makes, by number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

Role = Literal["pointwise", "reduction", "extern"]
"""What a compiler can do with an operator: compute it element by element inside of others, end a kernel with its sums,
or no more than call it."""


@dataclass(frozen=True, slots=True)
class Touch:
    """What one computation reads and makes: values by number, in the order of its operands and results."""

    role: Role
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    dtypes: tuple[str, ...]
    """Of what it reads, and then of what it makes."""
    views: tuple[int, ...] = ()
    """Where in memory the values that it reads begin; -1 if an element is made of others than its own."""
    in_rows: bool = False
    """Whether a reduction runs over short rows that lie in one piece, so that its kernel has them whole."""


@dataclass(frozen=True)
class NodeFlow:
    """The computations of a node's forward and backward, by their places in both lists of steps."""

    forward: Mapping[int, Touch] = field(default_factory=dict)
    backward: Mapping[int, Touch] = field(default_factory=dict)
    inputs: tuple[int | None, ...] = ()
    """The numbers of what the node is given, of what it gives,"""
    outputs: tuple[int | None, ...] = ()
    arriving: tuple[int | None, ...] = ()
    """of the gradients of its outputs,"""
    leaving: tuple[int | None, ...] = ()
    """and of those of its inputs."""
    sums: int = 0
    """Steps of backward, behind those for its inputs, that add these to gradients from other readers."""

    def then(self, place: int, other: NodeFlow) -> NodeFlow:
        """With another flow from the same inputs behind forward, whose steps begin at a place."""
        far = 1 + max(
            (n for touch in (*self.forward.values(), *self.backward.values()) for n in touch.writes), default=0
        )
        same = {theirs: ours for ours, theirs in zip(self.inputs, other.inputs, strict=False)}

        def renumbered(numbers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple([same.get(number) or far + number for number in numbers])

        added = {
            place + at: replace(touch, reads=renumbered(touch.reads), writes=renumbered(touch.writes))
            for at, touch in other.forward.items()
        }
        return replace(self, forward={**self.forward, **added})


NO_FLOW = NodeFlow()


class LiveMoment(NamedTuple):
    """The bytes that are held while a kernel runs."""

    is_backward: bool
    node: int
    bytes_held: int
    bytes_gradients: int
    """Of them, those that stay until the end: gradients of weights."""
