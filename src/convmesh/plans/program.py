"""A lowered plan: for one rank, the exact computations and transfers of a training step."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from convmesh.layout import Layout, Mesh
from convmesh.plans.fused.flow import NO_FLOW, LiveMoment, NodeFlow
from convmesh.plans.program_table import render
from convmesh.plans.steps import NOTHING_HELD, Held, Saved, Shape, Step, Steps, Transfer, Wait, Work, bytes_of

Phase = Literal["forward", "backward", "reduction", "update"]

BACKGROUND: frozenset[Phase] = frozenset({"reduction", "update"})
"""Phases whose collectives have process groups of their own (`OpenMesh.background`), so that layers do not queue behind
them."""


@dataclass(frozen=True)
class NodeProgram:
    """One rank's work for one node of the network."""

    node: str
    layer: str
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    dtypes: tuple[str, ...]
    forward: tuple[Step, ...] = ()
    backward: tuple[Step, ...] = ()
    saved: tuple[Saved, ...] = ()
    sources: tuple[str, ...] = ()
    """The nodes whose outputs are its inputs, in the order of `saved`'s indices."""
    held: Held = NOTHING_HELD
    block: str = ""
    """The recomputed module that contains this node."""
    weights: tuple[str, ...] = ()
    """The learning weights that it uses."""
    stage: int = 0
    """Its stage in a pipeline."""
    kind: str = ""
    """The operator, without its number of dims: `conv`, `relu`, `cat`."""
    weight_steps: int = 0
    """Steps at the end of `backward` that compute weight gradients, where a schedule runs them separately."""
    flow: NodeFlow = field(default=NO_FLOW, repr=False, compare=False)
    """Which values its computations read and make, in a program for a compiler."""

    @property
    def backward_apart(self) -> tuple[Steps, Steps]:
        """The steps for input gradients, and those for weight gradients, as separate lists."""
        border = len(self.backward) - self.weight_steps
        inputs, weights = self.backward[:border], self.backward[border:]
        posted = sum(isinstance(step, Transfer) for step in inputs)
        return inputs, tuple(_renumbered(step, posted) if isinstance(step, Wait) else step for step in weights)

    def bytes_outputs(self, rank: int) -> list[int]:
        """Bytes of a rank's shards of its outputs."""
        pairs = zip(self.outputs, self.dtypes, strict=True)
        return [bytes_of(layout.box(rank).shape, dtype) for layout, dtype in pairs]

    @property
    def transfers(self) -> Iterator[Transfer]:
        return iter([step for step in (*self.forward, *self.backward) if isinstance(step, Transfer)])

    @property
    def bytes_sent(self) -> int:
        return sum(transfer.bytes_sent for transfer in self.transfers)


@dataclass(frozen=True)
class WeightProgram:
    """One rank's part of one weight, and the axes over which its gradient is summed."""

    name: str
    shape: Shape
    local_shape: Shape
    dtype: str
    learns: bool
    cuts: tuple[tuple[int, tuple[str, ...]], ...] = ()
    sum_axes: tuple[str, ...] = ()
    elements_updated: int | None = None
    """Elements that this rank's optimiser updates; None for all that it holds."""

    @property
    def elements(self) -> int:
        """Elements that this rank's optimiser updates."""
        if not self.learns:
            return 0
        return math.prod(self.local_shape) if self.elements_updated is None else self.elements_updated

    @property
    def bytes_held(self) -> int:
        return bytes_of(self.local_shape, self.dtype)


@dataclass(frozen=True)
class BucketProgram:
    """Gradients that are summed together, once the last of them is computed.

    Each leg waits for the transfers of the leg before it: the sum, its second half if it has one, and the end.
    """

    weights: tuple[str, ...]
    legs: tuple[Steps, ...]


@dataclass(frozen=True)
class ShowingProgram:
    """Weights that are sent after the optimiser's step by the ranks that updated them."""

    weights: tuple[str, ...]
    start: Steps
    finish: Steps
    at_use: bool
    """Whether the next forward waits for them where they are used; else the optimiser's step waits."""


@dataclass(frozen=True)
class Program:
    """One rank's training step: nodes in order, backward in reverse, then the reduction of gradients.

    In a pipeline the nodes are those of the rank's stages, for one of `repeats` micro-batches.
    """

    mesh: Mesh
    rank: int
    nodes: tuple[NodeProgram, ...]
    weights: tuple[WeightProgram, ...]
    buckets: tuple[BucketProgram, ...] = ()
    """In the order in which they are posted."""
    stage: int = field(default=0)
    """The rank's first stage in a pipeline."""
    repeats: int = 1
    """Runs of the nodes in a step, before gradients are reduced once."""
    stages: int = 1
    """Stages of the whole pipeline."""
    schedule: str = ""
    """The order in which a pipeline runs micro-batches."""
    shown: tuple[ShowingProgram, ...] = ()
    """Weights sent after the optimiser's step; not among `transfers`, which end with backward."""
    bytes_buckets: int = 0
    """Bytes of the buckets and the gradients in them, held from step to step."""
    bytes_inputs: int = 0
    """This rank's part of the network's inputs, whichever stage uses them; of one micro-batch."""
    precision: str = ""
    """Autocast, as plans name it; empty: layers compute in the types of their weights."""
    compile: bool = False
    """Whether a compiler runs its computations: they are elementary, and `fused` makes kernels of them."""
    live: tuple[LiveMoment, ...] = field(default=(), repr=False)
    """What is held while each kernel runs, in order; empty unless a compiler has fused the program."""
    bytes_targets: int = 0
    """Its part of the targets, if they are a class for each sample or voxel; of one micro-batch."""

    def __str__(self) -> str:
        """The whole step as a table."""
        return render(self)

    def steps(self) -> Iterator[tuple[Phase, str, Step]]:
        """All steps in order, as phase, layer and step; phase `update` follows the optimiser."""
        yield from (("forward", node.layer, step) for node in self.nodes for step in node.forward)
        yield from (("backward", node.layer, step) for node in reversed(self.nodes) for step in node.backward)
        yield from (("reduction", "", step) for steps in self._legs() for step in steps)
        yield from (("update", "", step) for part in self.shown for step in (*part.start, *part.finish))

    def works(self) -> Iterator[Work]:
        """The computations among `steps`, in order."""
        forward, backward = ([getattr(node, phase) for node in self.nodes] for phase in ("forward", "backward"))
        update = (steps for part in self.shown for steps in (part.start, part.finish))
        for steps in itertools.chain(forward, reversed(backward), self._legs(), update):
            yield from [step for step in steps if isinstance(step, Work)]

    @property
    def reduction(self) -> tuple[Transfer, ...]:
        """The transfers that sum gradients, in the order in which they are posted."""
        return tuple(step for steps in self._legs() for step in steps if isinstance(step, Transfer))

    def _legs(self) -> Iterator[Steps]:
        """The first leg of all buckets, then the second of all, and so on."""
        for leg in itertools.zip_longest(*(bucket.legs for bucket in self.buckets), fillvalue=()):
            yield from leg

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
        """All transfers up to the end of backward, each with how often it runs in a step."""
        return iter(self._transfers)

    @cached_property
    def _transfers(self) -> list[tuple[Transfer, int]]:
        in_nodes = [(transfer, self.repeats) for node in self.nodes for transfer in node.transfers]
        return in_nodes + [(transfer, 1) for transfer in self.reduction]

    def transfers_with_update(self) -> Iterator[tuple[Transfer, int]]:
        """Those of `transfers`, and those that follow the optimiser's step."""
        yield from self.transfers()
        sent = (step for part in self.shown for step in (*part.start, *part.finish))
        yield from ((step, 1) for step in sent if isinstance(step, Transfer))

    @property
    def flops(self) -> int:
        return self.repeats * sum(step.flops for _, _, step in self.steps() if isinstance(step, Work))

    @property
    def bytes_weights(self) -> int:
        """Bytes of this rank's parameters."""
        return sum(weight.bytes_held for weight in self.weights)


def _renumbered(wait: Wait, posted: int) -> Wait:
    return replace(wait, transfers=tuple(number - posted for number in wait.transfers))
