"""A pipeline's step: `net(x, target)` runs micro-batches forward and backward through the stages.

The gradients that a schedule computes are set aside. `loss.backward()` delivers them to the parameters, scaled by the
gradient of the loss; from there on it is as without a pipeline: accumulation, the reduction over other axes, clipping.
With float16, gradients are computed before the scale of a `GradScaler` is applied: prefer bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from convmesh.dist import OpenMesh, dry_mesh
from convmesh.errors import ConvMeshError, OperatorError, ShapeError, UnsupportedError
from convmesh.gradients.local_gradients import local_of
from convmesh.graph import Captured
from convmesh.layout import Layout
from convmesh.lowering.dry_precision import precision_on
from convmesh.lowering.lower import lower
from convmesh.lowering.lowered import Lowered
from convmesh.ops.core.sharded import Sharded
from convmesh.plans.pipeline_rules import equal_share, microbatches_for, stages_of
from convmesh.plans.plan import Precision
from convmesh.private_torch import tree_flatten, tree_map, tree_unflatten
from convmesh.runtime.direct_engine import Loss, rebind, whole_loss
from convmesh.runtime.pipeline.compiled_stage import ActionCompiler
from convmesh.runtime.pipeline.micro_batch_loss import KINDS, REFUSED, Kind, compare, kind_of, shares
from convmesh.runtime.pipeline.micro_batches import MicroBatches, Runner
from convmesh.runtime.pipeline.stage_loss import StageLoss
from convmesh.runtime.pipeline.stage_modules import StageRegion, output_names, output_tree, returned
from convmesh.runtime.pipeline.stage_weights import from_stage
from convmesh.runtime.pipeline.torch_schedules import check_order

Gradients = list[torch.Tensor | None]


class _Deposit(torch.autograd.Function):
    """The loss, as a function of the parameters whose gradients are known already."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, gradients: Gradients, anchor: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        del anchor, parameters
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the pipeline's gradients were used up by an earlier `backward()` of this loss.")
        gradients, ctx.gradients = ctx.gradients, None
        if grad.is_cpu and grad == 1:  # the plain `backward()`; on a GPU the comparison would have to wait
            return None, None, None, *gradients
        for gradient in gradients:
            if gradient is not None:
                local_of(gradient).mul_(grad)
        return None, None, None, *gradients


class PipelineEngine:
    """Runs this rank's stages. Every rank gets its input and target shards; the first and the last stage use them."""

    def __init__(
        self,
        captured: Captured,
        lowered: Lowered,
        mesh: OpenMesh,
        loss: Loss | None,
        regions: Sequence[StageRegion],
        backend: str | None = None,
    ) -> None:
        """With a `backend`, stages are compiled."""
        assert lowered.plan.pipeline is not None
        check_order(mesh)
        self.mesh, self.loss = mesh, loss
        self._captured, self._lowered = captured, lowered
        self._names = [node.name for node in captured.graph.inputs]
        self._tree = output_tree(captured)
        self._regions = regions
        self.batch = self._batch_of(lowered)
        self._runners: dict[tuple[int, Precision], Runner] = {}
        self._kind: Kind = "mean" if lowered.plan.pipeline.microbatches == 1 else "unknown"
        self._tried: set[int] = set()
        layers = {node.node: node.layer for node in lowered.program.nodes}
        self._compiler = None if backend is None else ActionCompiler(self, layers, mesh, backend)

    @property
    def is_compiled(self) -> bool:
        return self._compiler is not None

    @property
    def told(self) -> list[str]:
        """Why stages run eagerly although they should be compiled: the reasons reported so far."""
        return [] if self._compiler is None else self._compiler.tell.told

    @property
    def networks(self) -> list[fx.GraphModule]:
        """The calls of this rank's stages."""
        return [region.module for region in self._regions]

    def rebind(self, owner: nn.Module) -> None:
        """Look up again the parameters that the network reads directly, not through a layer."""
        for region in self._regions:
            rebind(region.module, owner)
        self._runners.clear()

    def layout_of(self, planned: Layout) -> Layout:
        """The plan's layouts are those of micro-batches."""
        return self.batch.of_batch(planned)

    def outputs(self, inputs: list[Sharded]) -> Any:
        """The network's outputs, on every rank; without gradients."""
        runner = self._runner(inputs)
        runner.batch.check_joins()
        values = runner.everywhere(runner.forward(_locals(inputs)))
        return self._returned(runner.batch, values)

    def step(self, inputs: list[Sharded], targets: Any) -> tuple[torch.Tensor, Any]:
        """The global loss, whose `backward()` delivers the gradients; and on the last stage the outputs."""
        runner = self._runner(inputs)
        self._prepare(runner, targets)
        gradients: Gradients = []
        if torch.is_grad_enabled():
            parts, packed, gradients = self._train(runner, inputs)
        else:
            packed = runner.forward(_locals(inputs))
            parts = _losses(runner, packed) if runner.has_last else []
        loss = self._shared(runner, parts, packed, gradients)
        outputs = runner.parts(packed) if runner.has_last else ()
        if not torch.is_grad_enabled():
            return loss, outputs
        anchor = torch.zeros((), requires_grad=True)  # so that a stage without parameters has a backward too
        deposited: torch.Tensor = _Deposit.apply(loss, gradients, anchor, *self._parameters())
        return deposited, outputs

    def _train(self, runner: Runner, inputs: list[Sharded]) -> tuple[list[torch.Tensor], Any, Gradients]:
        """Run the schedule, and move the gradients that it computes away from the parameters."""
        parameters = self._parameters()
        earlier = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            parts, packed = runner.train(_locals(inputs))
            return parts, packed, [parameter.grad for parameter in parameters]
        finally:
            for parameter, grad in zip(parameters, earlier, strict=True):
                parameter.grad = grad

    def _parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank's stages that learn."""
        unique = dict.fromkeys(p for region in self._regions for p in region.module.parameters())
        return [parameter for parameter in unique if parameter.requires_grad]

    def _prepare(self, runner: Runner, targets: Any) -> None:
        """Cut and weigh the micro-batches' targets. A run without data refuses a wrong loss, on every rank."""
        assert self.loss is not None
        if self._kind == "unknown":
            self._kind = kind_of(self.loss, targets)
        if runner.batch.micro.shape[0] not in self._tried:
            self._try_loss(runner.batch, targets)
            self._tried.add(runner.batch.micro.shape[0])
        if runner.has_last:
            cut = runner.batch.targets(targets)
            runner.loss.targets, runner.loss.shares = cut, shares(self.loss, self._kind, cut, self.mesh)

    def _try_loss(self, batch: MicroBatches, targets: Any) -> None:
        dry = dry_mesh(self.mesh.mesh, self.mesh.rank, self.mesh.stands_for)
        replica = MicroBatches(batch.lowered, self._names, batch.outputs.names, dry)
        pairs = zip(batch.outputs.layouts, batch.outputs.dtypes, strict=True)
        values = [Sharded(torch.empty(at.box(dry.rank).shape, dtype=t, device="meta"), at, dry) for at, t in pairs]
        without_data = tree_map(lambda t: _on(t, dry), targets)
        assert self.loss is not None
        try:
            whole_loss(self.loss(self._returned(batch, values), replica.targets(without_data)[0]))
        except OperatorError:  # a loss that looks at values, or has its own weights, cannot run without data
            return
        except ConvMeshError:
            raise
        except Exception:  # the step will report it
            return

    def _returned(self, batch: MicroBatches, values: Sequence[Sharded]) -> Any:
        return returned(self._tree, dict(zip(batch.outputs.names, values, strict=True)), batch.lowered.numbers)

    def _shared(self, runner: Runner, parts: Sequence[torch.Tensor], packed: Any, gradients: Gradients) -> torch.Tensor:
        """The loss on every rank. In the first step, find out how it follows from its micro-batches' losses."""
        dtype = torch.float64 if torch.float64 in runner.batch.outputs.dtypes else torch.float32
        told = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        if runner.has_last:
            told[0] = sum(part.double() for part in parts)
            if self._kind == "unknown":
                told[1] = KINDS.index(self._compared(runner, parts, packed))
        home = (stages_of(runner.batch.pipeline) - 1) % self.mesh.mesh.axes["pipe"]
        told = from_stage(told, home, self.mesh)
        return (told[0] * (self._settle(int(told[1]), runner, gradients) if self._kind == "unknown" else 1)).to(dtype)

    def _settle(self, kind: int, runner: Runner, gradients: Gradients) -> int:
        """Keep the kind of the loss; scale the first step's gradients to it, and return the factor for its loss."""
        self._kind = KINDS[kind]
        if self._kind == "other":
            self._kind = "unknown"
            raise UnsupportedError(REFUSED)
        factor = runner.batch.count if self._kind == "sum" else 1
        for gradient in gradients:
            if gradient is not None and factor > 1:
                local_of(gradient).mul_(factor)
        return factor

    @torch.no_grad()
    def _compared(self, runner: Runner, parts: Sequence[torch.Tensor], packed: Any) -> Kind:
        """Compare with the loss of the whole batch, from the joined outputs and targets of all micro-batches."""
        assert self.loss is not None
        batch = runner.batch
        if any(layout.shape[:1] != batch.micro.shape[:1] for layout in batch.outputs.layouts):
            return "other"
        values = [batch.joined(outputs) for outputs in runner.parts(packed)]
        leaves = [tree_flatten(target) for target in runner.loss.targets]
        joined = [_joined(batch, list(column)) for column in zip(*(flat for flat, _ in leaves), strict=True)]
        targets = tree_unflatten(joined, leaves[0][1])
        whole = whole_loss(self.loss(self._returned(batch, values), targets))
        return compare(whole, [part / share for part, share in zip(parts, runner.loss.shares, strict=True)])

    def _runner(self, inputs: list[Sharded]) -> Runner:
        """The stages for a batch of this size, in the current precision; made when the first one comes."""
        samples = inputs[0].shape[0]
        if any(x.shape[0] != samples for x in inputs):
            raise ShapeError(f"the inputs have {[x.shape[0] for x in inputs]} samples; a pipeline needs equal numbers.")
        kind = samples, precision_on(self.mesh.device)
        if kind not in self._runners:
            batch = self._batch(*kind)
            loss = StageLoss(self, batch.outputs, partial(self._returned, batch), self.mesh)
            self._runners[kind] = Runner(batch, self._regions, loss, self._compiler)
        return self._runners[kind]

    def _batch(self, samples: int, precision: Precision) -> MicroBatches:
        """The layouts of such a batch. Values cross between stages in the types that they are computed in."""
        pipeline, plan = self.batch.pipeline, self._lowered.plan
        if samples == self.batch.micro.shape[0] * self.batch.count and precision == plan.precision:
            return self.batch
        cut = self.batch.micro.with_shape((samples, *self.batch.micro.shape[1:])).cuts[0].partition
        count = microbatches_for(
            equal_share(cut), pipeline.microbatches, pipeline.schedule, self.mesh.mesh.axes["pipe"]
        )
        plan = replace(plan, pipeline=replace(pipeline, microbatches=count), precision=precision)
        lowered = lower(self._captured, plan, self.mesh.rank, samples // count, self.mesh.stands_for)
        return self._batch_of(lowered)

    def _batch_of(self, lowered: Lowered) -> MicroBatches:
        return MicroBatches(lowered, self._names, output_names(self._captured), self.mesh)


def _losses(runner: Runner, packed: Any) -> list[torch.Tensor]:
    """Each micro-batch's part of the loss, from the packed outputs."""
    flats = zip(*(flat.chunk(runner.batch.count) for flat in packed), strict=True)
    return [runner.loss(chunk, index) for index, chunk in enumerate(flats)]


def _locals(inputs: Sequence[Sharded]) -> list[torch.Tensor]:
    return [x.local.detach() for x in inputs]


def _joined(batch: MicroBatches, parts: list[Any]) -> Any:
    return batch.joined(parts) if isinstance(parts[0], Sharded) else parts[0]


def _on(value: Any, mesh: OpenMesh) -> Any:
    """A shard of the same layout on a dry mesh."""
    if not isinstance(value, Sharded):
        return value
    return Sharded(torch.empty_like(value.local, device="meta"), value.layout, mesh)
