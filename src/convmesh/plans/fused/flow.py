"""How values flow through the computations of a node: what each of them reads and makes, by number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

Role = Literal["pointwise", "reduction", "extern"]
"""What a compiler can do with an operator: compute it element by element inside others, end a kernel with its sums, or
only call it."""


@dataclass(frozen=True, slots=True)
class Touch:
    """What one computation reads and makes: values by number, in the order of its operands and results."""

    role: Role
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    dtypes: tuple[str, ...]
    """Types of what it reads, then of what it makes."""
    views: tuple[int, ...] = ()
    """Where in memory the values that it reads begin; -1 if elements are made from others than their own."""
    in_rows: bool = False
    """Whether a reduction runs over short contiguous rows, so that its kernel has them whole."""


@dataclass(frozen=True)
class NodeFlow:
    """The computations of a node's forward and backward, by their places in both lists of steps."""

    forward: Mapping[int, Touch] = field(default_factory=dict)
    backward: Mapping[int, Touch] = field(default_factory=dict)
    inputs: tuple[int | None, ...] = ()
    """Numbers of the values that the node is given."""
    outputs: tuple[int | None, ...] = ()
    arriving: tuple[int | None, ...] = ()
    """Numbers of the gradients of its outputs."""
    leaving: tuple[int | None, ...] = ()
    """Numbers of the gradients of its inputs."""
    sums: int = 0
    """Steps of backward, after those for its inputs, that add these to gradients from other readers."""

    def then(self, place: int, other: NodeFlow) -> NodeFlow:
        """This flow with another one from the same inputs after forward, whose steps begin at `place`."""
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
    """Those of them that stay until the end: gradients of weights."""
