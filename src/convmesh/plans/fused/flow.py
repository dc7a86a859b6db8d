"""How values flow through the computations of a node: what each of them reads and makes, by number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

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
    in_rows: bool = False
    """Whether a reduction runs over short rows that lie in one piece, so that its kernel has them whole."""


@dataclass(frozen=True)
class Flow:
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


NO_FLOW = Flow()
