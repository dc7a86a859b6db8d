"""When a compiled step becomes CUDA graphs: after it has run a few times, and as long as its memory does not move."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from convmesh.dist import OpenMesh
from convmesh.dist.transfer_watch import is_watched
from convmesh.runtime.compiled.step_calls import StepCalls, agreed_segments
from convmesh.runtime.compiled.step_compiler import first_line
from convmesh.runtime.compiled.step_graphs import GraphRun, StepGraphs, Trained

STEPS_BEFORE = 2
"""Steps that run before one is captured: compilers compile, cuDNN chooses kernels, NCCL connects."""

MOST_CAPTURES = 4
"""Captures of one step: each new one because its tensors moved. After the last, it is replayed call by call."""


class GraphMemory:
    """Memory shared by a network's captured steps: at most one of them is between forward and backward."""

    def __init__(self, mesh: OpenMesh, tell: Callable[[str], None]) -> None:
        self.mesh, self.tell = mesh, tell
        self.is_possible = mesh.device.type == "cuda" and not (mesh.stages_through_host and mesh.mesh.size > 1)
        self._pool: Any = None
        self._running: weakref.ref[GraphRun] | None = None
        self._keep_gradients: Callable[[], None] | None = None

    @property
    def pool(self) -> Any:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    @property
    def is_free(self) -> bool:
        """Whether no step still needs what its forward left there. One whose loss was dropped never will."""
        run = None if self._running is None else self._running()
        return run is None or run.is_over

    def vacate(self) -> None:
        """Before graphs run: save the gradients that the last step left to parameters."""
        if self._keep_gradients is not None:
            self._keep_gradients()
        self._keep_gradients = None

    def occupied_by(self, run: GraphRun, keep_gradients: Callable[[], None]) -> GraphRun:
        self._running, self._keep_gradients = weakref.ref(run), keep_gradients
        return run


class GraphedStep:
    """The graphs of one step, if it has any yet."""

    def __init__(self, calls: StepCalls, memory: GraphMemory) -> None:
        self._calls, self._memory = calls, memory
        self._graphs: StepGraphs | None = None
        self._segments: list[tuple[int, ...]] | None = None
        self._steps = self._captures = 0
        self._gave_up = not memory.is_possible

    def begin(self, given: Sequence[torch.Tensor], fixed: range, trained: Trained) -> GraphRun | None:
        """Run forward as graphs; None if this step must be replayed call by call."""
        self._steps += 1
        if self._gave_up or self._steps <= STEPS_BEFORE or not self._memory.is_free or self._is_observed():
            return None
        self._memory.vacate()
        if self._graphs is None or not self._graphs.reads(given):
            self._capture(given, fixed)
        if self._graphs is None:
            return None
        self._graphs.begin(given, trained.buffers)
        run = GraphRun(self._graphs, trained, self._fail)
        return self._memory.occupied_by(run, partial(self._graphs.keep_gradients, trained.weights))

    def _is_observed(self) -> bool:
        """Whether someone watches the transfers one by one, or is capturing the step as part of something larger."""
        mesh = self._memory.mesh
        return is_watched() or mesh.traffic.listener is not None or torch.cuda.is_current_stream_capturing()

    def _capture(self, given: Sequence[torch.Tensor], fixed: range) -> None:
        self._graphs = None
        self._captures += 1
        if self._captures > MOST_CAPTURES:
            self._give_up(f"the network's tensors moved in memory {MOST_CAPTURES} times")
            return
        try:
            if self._segments is None:
                self._segments = agreed_segments(self._calls, self._memory.mesh)
            memory = self._memory
            self._graphs = StepGraphs(self._calls, self._segments, given, fixed, memory.mesh, memory.pool)
        except Exception as error:  # an operator that synchronises, or a transfer that cannot be captured
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        while error.__context__ is not None:  # ending the capture fails too, and says less
            error = error.__context__
        self._give_up(f"the step cannot be captured as a CUDA graph ({first_line(error)})")

    def _give_up(self, reason: str) -> None:
        self._gave_up, self._graphs = True, None
        self._memory.tell(reason)
