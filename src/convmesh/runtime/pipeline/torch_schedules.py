"""Schedules of torch.distributed.pipelining over our stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from convmesh.dist import OpenMesh
from convmesh.errors import MeshError
from convmesh.lowering.stage_program import CARRIER
from convmesh.ops.core.autocast import without_autocast
from convmesh.plans.pipeline_rules import rank_of
from convmesh.private_torch.backward_engine import keeps_its_graph
from convmesh.runtime.pipeline.compiled_stage import CompiledStage
from convmesh.runtime.pipeline.stage_messages import StageMessage, StageMessages
from convmesh.runtime.pipeline.stage_modules import StageModule

LossOf = Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor]
"""Maps the last stage's outputs and the micro-batch's number to its part of the loss."""


class CountedStage(PipelineStage):
    """A stage whose shapes are known in advance, and whose messages are counted when they are posted."""

    def __init__(
        self,
        module: StageModule,
        index: int,
        stages: int,
        mesh: OpenMesh,
        wire: torch.device,
        messages: StageMessages,
        compiled: CompiledStage | None = None,
    ) -> None:
        inputs, outputs = module.examples
        super().__init__(compiled or module, index, stages, wire, inputs, outputs, group=mesh.group(("pipe",)))
        self._open_mesh, self._module, self._messages, self._compiled = mesh, module, messages, compiled
        self._graphs: dict[int, list[Any]] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._module.chunk = fwd_chunk_id
        with self._messages.used(StageMessage("forward", self.stage_index, fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        posted = super().get_fwd_recv_ops(fwd_chunk_id)
        self._messages.expected(posted, StageMessage("forward", self.stage_index, fwd_chunk_id))
        return posted

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        posted = super().get_bwd_recv_ops(bwd_chunk_id)
        self._messages.expected(posted, StageMessage("backward", self.stage_index, bwd_chunk_id))
        return posted

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        posted = super().get_fwd_send_ops(fwd_chunk_id)
        return self._counted(posted, StageMessage("forward", self.stage_index + 1, fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        posted = super().get_bwd_send_ops(bwd_chunk_id)
        return self._counted(posted, StageMessage("backward", self.stage_index - 1, bwd_chunk_id))

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Keep a micro-batch's graph after its input gradients, if weight gradients are computed later."""
        if self.has_backward and not kwargs.get("full_backward", True) and not graphs_keep_functions():
            ends = [loss] if self.is_last else self.fwd_cache[bwd_chunk_id][0]
            # A view's node keeps the graph alive; one written in Python, as the end's may be, does not keep itself.
            self._graphs[bwd_chunk_id] = [end.view_as(end).grad_fn for end in ends]
        if self._compiled is not None:
            self._compiled.begin_backward(bwd_chunk_id, bool(kwargs.get("full_backward", True)))
        message = StageMessage("backward", self.stage_index, bwd_chunk_id)
        # Without autocast, like `backward()`, which runs after the block that casts.
        with without_autocast(self._open_mesh.device), self._messages.used(message):
            return super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with without_autocast(self._open_mesh.device), self._messages.used():
            result = super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._graphs.pop(bwd_chunk_id, None)
        return result

    def _counted(self, posted: list[dist.P2POp], message: StageMessage) -> list[dist.P2POp]:
        mesh = self._open_mesh
        for op in posted:
            mesh.traffic.record(CARRIER, op.tensor.nbytes, ("pipe",), rank_of(message.stage, mesh.mesh, mesh.rank))
        self._messages.sent(posted, message)
        return posted


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        del ctx
        return grad


@cache
def graphs_keep_functions() -> bool:
    """Whether a function written in Python can still be differentiated after the graph around it is freed (2.13)."""
    end: torch.Tensor = _Probe.apply(torch.zeros(1, requires_grad=True)).clone()
    assert end.grad_fn is not None
    function = end.grad_fn.next_functions[0][0]
    end.detach_()
    return keeps_its_graph(function)


def make_schedule(name: str, stages: Sequence[CountedStage], microbatches: int, loss: LossOf | None) -> Any:
    """The schedule of a plan for this rank's stages; without a loss it runs forward only.

    With fewer micro-batches than stages, 1F1B is GPipe.
    """
    options: dict[str, Any] = {"n_microbatches": microbatches, "loss_fn": loss, "scale_grads": False}
    if name in ("gpipe", "1f1b"):
        (stage,) = stages
        turns = name == "1f1b" and loss is not None and microbatches >= stage.num_stages
        return Schedule1F1B(stage, **options) if turns else ScheduleGPipe(stage, **options)
    if name == "zero-bubble" and loss is not None:
        return ScheduleInterleavedZeroBubble(list(stages), **options)
    return ScheduleInterleaved1F1B(list(stages), **options)


def check_order(mesh: OpenMesh) -> None:
    """Torch takes a stage's rank from its place in the process group, whose ranks are in the order of the job."""
    if mesh.members(("pipe",)) != mesh.mesh.group(("pipe",), mesh.rank):
        raise MeshError("a mesh with a pipe axis must list its `ranks` in rising order along it; sort them.")
