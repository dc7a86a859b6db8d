"""What a rank holds at most while a program runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from convmesh.oracle.assumptions import STATES, Assumptions
from convmesh.plan.program import BYTES_OF, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes at the moment when most is held, and the layer that runs then."""

    bytes_weights: int
    bytes_gradients: int
    bytes_optimizer: int
    bytes_activations: int
    bytes_buffers: int
    """What is held for a moment: gathered tensors, halos, buckets, workspace."""
    layer: str

    @property
    def bytes_peak(self) -> int:
        held = self.bytes_weights + self.bytes_gradients + self.bytes_optimizer
        return held + self.bytes_activations + self.bytes_buffers


def memory_of(program: Program, assumptions: Assumptions | None = None) -> Memory:
    """By liveness of the program's own tensors."""
    learning = [w for w in program.weights if w.learns]
    elements = sum(math.prod(w.local_shape) * BYTES_OF.get(w.dtype, 4) for w in learning)
    kept = sum(s.bytes_kept for node in program.nodes for s in node.saved if s.what != "weight")
    return Memory(
        bytes_weights=program.bytes_weights,
        bytes_gradients=elements,
        bytes_optimizer=elements * STATES[(assumptions or Assumptions()).optimizer],
        bytes_activations=kept,
        bytes_buffers=0,
        layer=program.nodes[-1].layer if program.nodes else "",
    )
