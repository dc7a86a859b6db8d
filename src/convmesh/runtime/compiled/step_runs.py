"""One step between its forward and the end of its backward, replayed call by call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from convmesh.dist import OpenMesh
from convmesh.errors import ConvMeshError
from convmesh.runtime.compiled.step_calls import StepCall, StepCalls, Values, replay


class StepRun(Protocol):
    """A step whose forward has run."""

    @property
    def results(self) -> Sequence[torch.Tensor]:
        """What forward computed: in a step, the loss, whether outputs are finite, and the label notes."""

    def gradients(self, number: int, *tangents: torch.Tensor) -> Sequence[torch.Tensor]:
        """Run a piece of backward, which begins with `tangents`; return the gradients that are then ready."""


class PlainRun:
    """Makes the calls one by one, without graphs."""

    def __init__(self, calls: StepCalls, given: Sequence[torch.Tensor], mesh: OpenMesh) -> None:
        self._calls, self._mesh = calls, mesh
        read = [t.to(dtype) for t, dtype in zip(given, calls.types, strict=True)]
        self._values: Values = dict(zip(calls.inputs, read, strict=True))
        self._next = 0
        with torch.no_grad():
            replayed(calls.forward, self._values, mesh)
        self.results: Sequence[torch.Tensor] = [self._values[place] for place in calls.results]

    def gradients(self, number: int, *tangents: torch.Tensor) -> Sequence[torch.Tensor]:
        require_next(number, self._next)
        self._next += 1
        values = self._values
        if number == 0:
            values.update(zip(self._calls.tangents, tangents, strict=True))
        gradients = replayed_piece(self._calls, number, values, self._mesh)
        if self._next == len(self._calls.pieces):
            values.clear()
        return gradients


def replayed_piece(calls: StepCalls, number: int, values: Values, mesh: OpenMesh) -> list[torch.Tensor]:
    """Make the calls of a piece of backward; return the gradients that are then ready."""
    piece = calls.pieces[number]
    replayed(piece.calls, values, mesh)
    gradients = [values[calls.gradients[i]] for i in piece.gradients]
    for place in piece.frees:
        del values[place]
    return gradients


def replayed(calls: Sequence[StepCall], values: Values, mesh: OpenMesh) -> None:
    """Replay outside of autocast: the casts are in the trace, and neither operators nor the compiler may add others."""
    with torch.autocast(mesh.device.type, enabled=False):
        replay(calls, values)


def require_next(number: int, expected: int) -> None:
    """Refuse a piece of backward out of turn: what it reads is gone."""
    if number != expected:
        raise ConvMeshError(
            "backward of a compiled step ran a second time; call `backward()` once per loss, or use compile=False."
        )
