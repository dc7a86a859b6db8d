"""A step's calls captured as CUDA graphs, transfers included: a step is a few launches, however many layers it has.

Graphs read and write the memory that they were captured with. So batches are copied to a fixed place, weights must not
move, and gradients are in memory that the next step of any kind overwrites: parameters that still hold some by then
are given a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from convmesh.dist import OpenMesh
from convmesh.gradients.local_gradients import local_of
from convmesh.private_torch.graph_capture import capturing
from convmesh.runtime.compiled.step_calls import StepCalls, Values
from convmesh.runtime.compiled.step_runs import PlainRun, replayed, replayed_piece, require_next


@dataclass(frozen=True)
class GraphPart:
    """A part of the step, with the traffic that it sends: nothing is posted in a replay, so the replay counts it."""

    graph: torch.cuda.CUDAGraph
    bytes_sent: Counter[str]
    calls: Counter[str]

    def replay(self, mesh: OpenMesh) -> None:
        self.graph.replay()
        mesh.traffic.bytes_sent.update(self.bytes_sent)
        mesh.traffic.calls.update(self.calls)


class StepGraphs:
    """A captured step: each part at its first run, in the thread that runs it, where cuDNN knows its kernels."""

    def __init__(
        self,
        calls: StepCalls,
        segments: Sequence[tuple[int, ...]],
        given: Sequence[torch.Tensor],
        fixed: range,
        mesh: OpenMesh,
        pool: Any,
    ) -> None:
        """`segments`: each graph's pieces of backward. `given`: the step's inputs, those in `fixed` read in place."""
        self.calls, self.mesh, self._pool, self._fixed = calls, mesh, pool, fixed
        self._segments = {segment[0]: segment for segment in segments}
        rooms = zip(given, calls.types, strict=True)
        self._inputs = [t if i in fixed else _room_for(t, dtype) for i, (t, dtype) in enumerate(rooms)]
        self._places = [t.data_ptr() for t in self._inputs]
        self._values: Values = dict(zip(calls.inputs, self._inputs, strict=True))
        with self._capturing() as self._forward:
            replayed(calls.forward, self._values, mesh)
        self.results = [self._values[place] for place in calls.results]
        self.tangent = torch.ones_like(self.results[0])
        (place,) = calls.tangents
        self._values[place] = self.tangent
        self._backward: dict[int, GraphPart] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        self._buffers: list[torch.Tensor] | None = None
        """As they were before a step with a part that is not captured yet."""

    @contextmanager
    def _capturing(self) -> Iterator[GraphPart]:
        """Capture what runs in here; other threads, such as a watchdog's, may go on using the GPU."""
        traffic = self.mesh.traffic
        part = GraphPart(torch.cuda.CUDAGraph(), Counter(), Counter())
        device = torch.cuda.device(self.mesh.device)
        with traffic.watch() as sent, torch.no_grad(), device, capturing(part.graph, self._pool):
            yield part
        part.bytes_sent.update(sent.bytes_sent)
        part.calls.update(sent.calls)
        traffic.bytes_sent -= sent.bytes_sent  # it was not sent yet
        traffic.calls -= sent.calls

    def reads(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether the tensors that graphs read in place are still there."""
        return all(given[i].data_ptr() == self._places[i] for i in self._fixed)

    def begin(self, given: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        """Run forward on these inputs; `buffers` are those that a step may change."""
        for i, t in enumerate(given):
            if i not in self._fixed:
                self._inputs[i].copy_(t, non_blocking=True)
        is_whole = len(self._backward) == len(self._segments)
        self._buffers = None if is_whole else [buffer.clone() for buffer in buffers]
        self._forward.replay(self.mesh)

    def begin_again(self, buffers: Sequence[torch.Tensor]) -> PlainRun:
        """The step from its beginning, call by call, after a part of backward could not be captured."""
        assert self._buffers is not None
        for buffer, before in zip(buffers, self._buffers, strict=True):
            buffer.copy_(before)
        return PlainRun(self.calls, self._inputs, self.mesh)

    def keep_gradients(self, weights: Sequence[torch.Tensor]) -> None:
        """Copy the gradients that parameters still hold out of the graphs' memory, which graphs will overwrite."""
        for i, gradient in self.gradients.items():
            kept = weights[i].grad
            if kept is not None and local_of(kept).data_ptr() == gradient.data_ptr():
                weights[i].grad = kept.clone()

    def run_piece(self, number: int) -> None:
        """Run the graph that begins with this piece of backward; the piece may have run with an earlier one."""
        segment = self._segments.get(number)
        if segment is None:
            return
        if number not in self._backward:
            self._backward[number] = self._captured(segment)
        self._backward[number].replay(self.mesh)

    def _captured(self, segment: Sequence[int]) -> GraphPart:
        with self._capturing() as part:
            for number in segment:
                ready = replayed_piece(self.calls, number, self._values, self.mesh)
                self.gradients.update(zip(self.calls.pieces[number].gradients, ready, strict=True))
        return part


@dataclass(frozen=True)
class Trained:
    """What a step works on: parameters, by the numbers of their gradients, and the tensors that it changes itself."""

    weights: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]


class GraphRun:
    """A step under way whose parts are graphs. If one cannot be captured, the step starts over without graphs.

    That sends forward's messages again, so it must happen on all ranks; it does, as they run the same operators.
    """

    def __init__(self, graphs: StepGraphs, trained: Trained, failed: Callable[[Exception], None]) -> None:
        self._graphs, self._trained, self._failed = graphs, trained, failed
        # Label notes are read a step later, after the next step has used this memory.
        self.results: Sequence[torch.Tensor] = [t.clone() if t.numel() == 1 else t for t in graphs.results]
        self._next = 0
        self._plain: PlainRun | None = None

    @property
    def is_over(self) -> bool:
        """Whether its memory may be used by another step."""
        return self._next == len(self._graphs.calls.pieces)

    def gradients(self, number: int, *tangents: torch.Tensor) -> Sequence[torch.Tensor]:
        require_next(number, self._next)
        self._next += 1
        graphs = self._graphs
        if self._plain is not None:
            return self._plain.gradients(number, *tangents)
        if number == 0:
            graphs.tangent.copy_(tangents[0])
        try:
            graphs.run_piece(number)
        except Exception as error:  # an operator that synchronises, or a transfer that cannot be captured
            self._failed(error)
            return self._without_graphs(number, *tangents)
        return [graphs.gradients[i] for i in graphs.calls.pieces[number].gradients]

    def _without_graphs(self, number: int, *tangents: torch.Tensor) -> Sequence[torch.Tensor]:
        self._plain = self._graphs.begin_again(self._trained.buffers)
        for earlier in range(number):
            self._plain.gradients(earlier, *tangents)
        return self._plain.gradients(number, *tangents)


def _room_for(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)
