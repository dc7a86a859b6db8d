"""A lowered plan: for one rank the exact list of computations and transfers of a training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from convmesh.layout import Layout, Mesh

Shape = tuple[int, ...]
Phase = Literal["forward", "backward", "reduction"]


@dataclass(frozen=True, slots=True)
class Work:
    """One local computation: the operator, its local shapes, and what it costs at least."""

    op: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    dtype: str
    flops: int
    bytes_moved: int
    options: tuple[object, ...] = ()
    """The operator's other arguments: stride, padding, which gradients."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message to `peer`, or one collective over the ranks along `axes`, as this rank posts it."""

    carrier: str
    axes: tuple[str, ...]
    bytes_sent: int
    peer: int | None = None


Step = Work | Transfer


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor kept for backward: an input or output of the node (by index), a weight, or one of its own."""

    what: Literal["input", "output", "weight", "own"]
    index: int
    bytes_kept: int


@dataclass(frozen=True)
class NodeProgram:
    """What one rank does for one node of the network."""

    node: str
    layer: str
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    dtypes: tuple[str, ...]
    forward: tuple[Step, ...] = ()
    backward: tuple[Step, ...] = ()
    saved: tuple[Saved, ...] = ()
    sources: tuple[str, ...] = ()
    """The nodes whose tensors it is given, in the order in which `saved` counts them."""

    @property
    def transfers(self) -> Iterator[Transfer]:
        return (step for step in (*self.forward, *self.backward) if isinstance(step, Transfer))

    @property
    def bytes_sent(self) -> int:
        return sum(transfer.bytes_sent for transfer in self.transfers)


@dataclass(frozen=True)
class WeightProgram:
    """What one rank holds of one weight, and over which axes its gradient is summed."""

    name: str
    shape: Shape
    local_shape: Shape
    dtype: str
    learns: bool
    cuts: tuple[tuple[int, tuple[str, ...]], ...] = ()
    sum_axes: tuple[str, ...] = ()

    @property
    def bytes_held(self) -> int:
        return _bytes(self.local_shape, self.dtype)


@dataclass(frozen=True)
class Program:
    """One rank's training step: nodes in order, backward in the reverse order, then what reduces gradients.

    In a pipeline the nodes are those of the rank's stages, for one of `repeats` micro-batches: they run that often.
    """

    mesh: Mesh
    rank: int
    nodes: tuple[NodeProgram, ...]
    weights: tuple[WeightProgram, ...]
    reduction: tuple[Transfer, ...] = ()
    stage: int = field(default=0)
    """The rank's first stage in a pipeline."""
    repeats: int = 1
    """How often the nodes run in a step, before gradients are reduced once."""

    def __str__(self) -> str:
        """The whole step as a table."""
        from convmesh.plan.table import render  # which is made of programs

        return render(self)

    def steps(self) -> Iterator[tuple[Phase, str, Step]]:
        """Everything in the order it runs: phase, layer, step."""
        yield from (("forward", node.layer, step) for node in self.nodes for step in node.forward)
        yield from (("backward", node.layer, step) for node in reversed(self.nodes) for step in node.backward)
        yield from (("reduction", "", step) for step in self.reduction)

    @property
    def bytes_sent(self) -> Counter[str]:
        """Bytes that this rank sends in a step, by carrier."""
        sent: Counter[str] = Counter()
        for transfer, times in self.transfers():
            sent[transfer.carrier] += transfer.bytes_sent * times
        return sent

    @property
    def messages(self) -> Counter[str]:
        """Messages and collectives that this rank posts in a step, by carrier."""
        posted: Counter[str] = Counter()
        for transfer, times in self.transfers():
            posted[transfer.carrier] += times
        return posted

    def transfers(self) -> Iterator[tuple[Transfer, int]]:
        """With how often each runs in a step."""
        yield from ((transfer, self.repeats) for node in self.nodes for transfer in node.transfers)
        yield from ((transfer, 1) for transfer in self.reduction)

    @property
    def flops(self) -> int:
        return self.repeats * sum(step.flops for _, _, step in self.steps() if isinstance(step, Work))

    @property
    def bytes_weights(self) -> int:
        """Bytes of this rank's parameters."""
        return sum(weight.bytes_held for weight in self.weights)


def _bytes(shape: Shape, dtype: str) -> int:
    elements = 1
    for extent in shape:
        elements *= extent
    return elements * BYTES_OF.get(dtype, 4)


BYTES_OF = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
