"""Gradients on their way back: their strides, and the sums that autograd makes where a value has several users.

A gradient has the strides that its operator gave it, often not those of its value; operators that meet both are then
slower, or copy first. Nodes are walked from the last to the first, and a node whose gradient arrives with other strides
than its first dry run assumed is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from convmesh.dist import OpenMesh, dry_mesh
from convmesh.kernels.memory_format import Order
from convmesh.layout import Mesh
from convmesh.lowering.dry_values import Dry, DryResult, Strides, lying
from convmesh.lowering.recorder import recorded
from convmesh.plans import NodeProgram, Step

Place = tuple[str, int]
"""A node, and the index of one of its tensors."""

MOST_ADDED = 1 << 12
"""Different gradients kept, over all networks."""


@dataclass(frozen=True)
class Visit:
    """A node's dry run: its result, its input tensors, and the run itself, to repeat for other gradients."""

    result: DryResult
    inputs: tuple[tuple[Place | None, Dry], ...]
    """Each with its producer; None for a shared redistributed input."""
    again: Callable[[tuple[Strides | None, ...]], DryResult]
    stage: int = 0


class Returning:
    """Walks a network's nodes backwards, on one rank."""

    def __init__(self, visits: Mapping[str, Visit], mesh: OpenMesh) -> None:
        self._visits, self._mesh = visits, mesh
        self._arrived: dict[Place, Strides | None] = {}

    def programs(self, nodes: Sequence[NodeProgram]) -> tuple[NodeProgram, ...]:
        """The nodes, with backward as gradients reach them; each of a tensor's users but the last adds its own."""
        return tuple(reversed([self._program(node) for node in reversed(nodes)]))

    def _program(self, node: NodeProgram) -> NodeProgram:
        if node.node not in self._visits:
            return node
        visit = self._visits[node.node]
        ends = tuple(self._arrived.get((node.node, index)) for index in range(len(node.outputs)))
        result = visit.again(ends) if any(ends) else visit.result
        sums = self._pass_on(visit, result)
        if result is visit.result and not sums:
            return node
        steps, end = result.backward, len(result.backward) - result.weight_steps
        # The owners of gradients' memory stay as first found: a gradient that is part of another would count whole.
        held, again = node.held, result.held
        held = replace(held, bytes_backward=again.bytes_backward, bytes_weights=again.bytes_weights)
        backward = (*steps[:end], *sums, *steps[end:]) if sums else steps
        return replace(node, backward=backward, held=held, flow=replace(result.flow, sums=len(sums)))

    def _pass_on(self, visit: Visit, result: DryResult) -> list[Step]:
        """Pass every input's gradient to the node that made it; returns the sums on the way."""
        steps: list[Step] = []
        for (place, value), strides in zip(visit.inputs, result.gradients, strict=True):
            if strides is None:
                continue
            if place is None:  # it is added to that of the node that rearranged the input
                steps += self._sum(value, strides, strides)[0]
                continue
            crosses = place[0] in self._visits and self._visits[place[0]].stage != visit.stage
            # What travels between stages is packed, and unpacked in the value's order.
            arriving = None if crosses or strides == self._own(value) else strides
            if place in self._arrived:
                more, total = self._sum(value, self._arrived[place], arriving)
                steps += more
                arriving = None if total == self._own(value) else total
            self._arrived[place] = arriving
        return steps

    def _own(self, value: Dry) -> Strides:
        """Strides of a gradient laid out like its value, as the first dry run assumed."""
        return _laid_out(value.layout.box(self._mesh.rank).shape, value.order)

    def _sum(self, value: Dry, one: Strides | None, other: Strides | None) -> tuple[tuple[Step, ...], Strides]:
        shape, own = value.layout.box(self._mesh.rank).shape, self._own(value)
        return _added(shape, value.dtype, one or own, other or own)


@lru_cache(maxsize=MOST_ADDED)
def _laid_out(shape: tuple[int, ...], order: Order) -> Strides:
    """Strides of a gradient laid out like a value with its dims in this order."""
    value = torch.empty_permuted(shape, order or tuple(range(len(shape))), device="meta")
    return lying(value, None).stride()


@lru_cache(maxsize=MOST_ADDED)
def _added(
    shape: tuple[int, ...], dtype: torch.dtype, one: Strides, other: Strides
) -> tuple[tuple[Step, ...], Strides]:
    """The sum of two gradients: its steps and its strides."""
    parts = [torch.empty_strided(shape, strides, dtype=dtype, device="meta") for strides in (one, other)]
    with torch.no_grad(), recorded(dry_mesh(Mesh(), 0)) as steps:
        total = torch.add(*parts)
    return tuple(steps), total.stride()
