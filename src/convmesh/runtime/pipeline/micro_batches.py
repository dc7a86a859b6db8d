"""Batches of one size in a pipeline: their micro-batches, and the stages and schedules that run them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from convmesh.dist import OpenMesh
from convmesh.errors import UnsupportedError
from convmesh.layout import Layout
from convmesh.layout.layout import Cut, fair_cut
from convmesh.layout.partition import Partition
from convmesh.lowering.loss_node import target_layout
from convmesh.lowering.lowered import Lowered
from convmesh.lowering.parcels import Parcel, parcel_of, rows
from convmesh.ops.core.sharded import Sharded
from convmesh.plans.pipeline_rules import stages_of
from convmesh.private_torch import tree_flatten, tree_unflatten
from convmesh.runtime.pipeline.compiled_stage import ActionCompiler, CompiledStage
from convmesh.runtime.pipeline.stage_loss import StageLoss
from convmesh.runtime.pipeline.stage_messages import StageMessages
from convmesh.runtime.pipeline.stage_modules import StageModule, StageRegion
from convmesh.runtime.pipeline.stage_weights import from_stage
from convmesh.runtime.pipeline.torch_schedules import CountedStage, LossOf, make_schedule


class MicroBatches:
    """The layouts of batches and micro-batches of one size.

    Each rank cuts its samples, in order, into equal parts; micro-batch i consists of every rank's i-th part.
    """

    def __init__(self, lowered: Lowered, inputs: Sequence[str], outputs: Sequence[str], mesh: OpenMesh) -> None:
        assert lowered.plan.pipeline is not None
        self.lowered, self.mesh = lowered, mesh
        self.pipeline = lowered.plan.pipeline
        self.count = self.pipeline.microbatches
        self.micro = lowered.layouts[inputs[0]][0]
        self.outputs: Parcel = parcel_of(outputs, lowered)

    def inputs(self, names: Sequence[str]) -> list[Layout]:
        """The layouts of the whole batch's inputs."""
        return [self.of_batch(self.lowered.layouts[name][0]) for name in names]

    def of_batch(self, micro: Layout) -> Layout:
        """The layout of a whole batch: samples cut as the inputs' are, other dims as in the micro-batch if possible."""
        samples = self.micro.shape[0]
        if not micro.shape or micro.shape[0] != samples:
            return micro
        axes = self.micro.cuts[0].axes
        others = [_without(cut, axes) for cut in micro.cuts[1:]]
        return Layout(micro.mesh, [fair_cut(micro.mesh, samples * self.count, axes), *others])

    def targets(self, targets: Any) -> list[Any]:
        """The targets of each micro-batch, cut as its outputs are."""
        leaves, spec = tree_flatten(targets)
        parts = [self._parts(leaf) for leaf in leaves]
        return [tree_unflatten([part[index] for part in parts], spec) for index in range(self.count)]

    def _parts(self, target: Any) -> list[Any]:
        samples = self.micro.shape[0]
        if not isinstance(target, Sharded) or not target.dim() or target.shape[0] != samples * self.count:
            return [target] * self.count
        placed = target.redistribute(self.of_batch(target.layout.with_shape((samples, *target.shape[1:]))))
        shape = (samples, *target.shape[1:])
        here, there = placed.layout.with_shape(shape), target_layout(self.outputs.layouts[0], shape)
        return [Sharded(part, here, self.mesh).redistribute(there) for part in rows(placed.local, self.count)]

    def check_joins(self) -> None:
        """Refuse outputs without a sample dim, before any is computed."""
        for layout in self.outputs.layouts:
            if self.count > 1 and layout.shape[:1] != self.micro.shape[:1]:
                raise UnsupportedError(
                    f"an output of shape {layout.shape} has no sample dim along which {self.count} micro-batches can "
                    "be joined; use `microbatches=1`."
                )

    def joined(self, parts: Sequence[Sharded]) -> Sharded:
        """A value of the whole batch from those of its micro-batches."""
        if parts[0].shape[:1] != self.micro.shape[:1]:
            return parts[0]
        target = self.of_batch(parts[0].layout)
        at = target.with_shape((self.micro.shape[0], *target.shape[1:]))
        return Sharded(torch.cat([part.redistribute(at).local for part in parts]), target, self.mesh)


def _without(cut: Cut, axes: tuple[str, ...]) -> Cut:
    """The cut of a dim, or none if any of `axes` cuts it."""
    return Cut((), Partition.even(cut.partition.extent, 1)) if {*cut.axes} & {*axes} else cut


class Runner:
    """This rank's stages and schedules for batches of one size."""

    def __init__(
        self,
        batch: MicroBatches,
        regions: Sequence[StageRegion],
        loss: StageLoss,
        compiler: ActionCompiler | None = None,
    ) -> None:
        self.batch, self.mesh, self.loss = batch, batch.mesh, loss
        self._regions, self._compiler = regions, compiler
        self._stages = stages_of(batch.pipeline)

    @property
    def has_first(self) -> bool:
        return any(region.index == 0 for region in self._regions)

    @property
    def has_last(self) -> bool:
        return any(region.index == self._stages - 1 for region in self._regions)

    @cached_property
    def _training(self) -> tuple[list[StageModule], Any]:
        return self._scheduled(self.loss)

    @cached_property
    def _forward_only(self) -> tuple[list[StageModule], Any]:
        return self._scheduled(None)

    def _scheduled(self, loss: StageLoss | None) -> tuple[list[StageModule], Any]:
        wire = self.mesh.wire_device
        modules = [StageModule(region, self.batch.lowered, wire) for region in self._regions]
        compiled = [self._compiled(module, loss) for module in modules]
        messages = StageMessages()
        stages = [
            CountedStage(module, module.index, self._stages, self.mesh, wire, messages, replacing)
            for module, replacing in zip(modules, compiled, strict=True)
        ]
        parts = None if loss is None else self._parts_of(loss, compiled[-1])
        return modules, make_schedule(self.batch.pipeline.schedule, stages, self.batch.count, parts)

    def _compiled(self, module: StageModule, loss: StageLoss | None) -> CompiledStage | None:
        """What replays a stage, if it is compiled."""
        if self._compiler is None:
            return None
        ends = loss if module.index == self._stages - 1 else None
        # The first stage has no inputs whose gradients come first.
        splits = self.batch.pipeline.schedule == "zero-bubble" and loss is not None and module.index > 0
        return CompiledStage(module, ends, self._compiler, splits)

    def _parts_of(self, loss: StageLoss, last: CompiledStage | None) -> LossOf:
        """Where the parts of the loss come from; a rank's stages are in order, so the last one comes last."""
        if last is not None and self.has_last:
            return last.loss_of
        return lambda packed, index: loss(packed, int(index))

    def train(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Forward and backward of all micro-batches; on the last stage, returns their parts of the loss and outputs."""
        modules, schedule = self._training
        losses: list[torch.Tensor] = []
        target = torch.arange(self.batch.count) if self.has_last else None
        outputs = self._run(modules, schedule, inputs, target=target, losses=losses)
        return [loss.detach() for loss in losses], outputs

    @torch.no_grad()
    def forward(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Forward of all micro-batches; on the last stage, returns their outputs."""
        return self._run(*self._forward_only, inputs)

    def _run(self, modules: Sequence[StageModule], schedule: Any, inputs: Sequence[torch.Tensor], **more: Any) -> Any:
        drawn = torch.randint(1 << 62, (self.batch.count,), generator=self.mesh.seeds, device="cpu")
        for module in modules:
            module.seeds = drawn.tolist()
        return schedule.step(*(inputs if self.has_first else ()), **more)

    def parts(self, outputs: Sequence[torch.Tensor]) -> list[list[Sharded]]:
        """The last stage's packed outputs, by output and micro-batch."""
        chunks = [flat.chunk(self.batch.count) for flat in outputs]
        with torch.no_grad():
            by_chunk = [self.batch.outputs.unpack(flats, self.mesh) for flats in zip(*chunks, strict=True)]
        return [list(values) for values in zip(*by_chunk, strict=True)]

    def everywhere(self, outputs: Any) -> list[Sharded]:
        """The outputs of the whole batch on every rank along the pipe axis."""
        home = (self._stages - 1) % self.mesh.mesh.axes["pipe"]
        if self.has_last:
            values = [self.batch.joined(parts) for parts in self.parts(outputs)]
            return [value.like(from_stage(value.local, home, self.mesh)) for value in values]
        planned = zip(self.batch.outputs.layouts, self.batch.outputs.dtypes, strict=True)
        return [self._received(layout, dtype, home) for layout, dtype in planned]

    def _received(self, micro: Layout, dtype: torch.dtype, home: int) -> Sharded:
        layout = self.batch.of_batch(micro)
        empty = torch.empty(layout.box(self.mesh.rank).shape, dtype=dtype, device=self.mesh.device)
        return Sharded(from_stage(empty, home, self.mesh), layout, self.mesh)
