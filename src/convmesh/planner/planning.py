"""Making plans: from a model, a sample, a mesh and a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from convmesh.errors import PlanError
from convmesh.graph import Captured
from convmesh.layout import Mesh
from convmesh.planner.drafting import DraftOptions, Sample, Splits, draft, network_of
from convmesh.planner.searching import best_on, decided, loaded, search_captured
from convmesh.planner.staging import StageOptions
from convmesh.plans import Plan, PresetOptions
from convmesh.plans.plan import Attention, BatchNorm, Precision, Schedule
from convmesh.plans.space_rows import LEAST_ROWS
from convmesh.plans.summing import Compression, Reduction
from convmesh.system import System

Strategy = str | Plan | Splits


def plan(
    model: nn.Module | Captured,
    sample: Sample,
    mesh: Mesh | None = None,
    strategy: Strategy = "auto",
    *,
    gpus: int | None = None,
    system: System | str | None = None,
    batchnorm: BatchNorm = "global",
    checkpoint: Sequence[str] = (),
    reduction: Reduction = "bucketed",
    compression: Compression = "none",
    ranks_per_host: int = 1,
    attention: Attention | None = None,
    sub_batches: int | None = None,
    least_rows: int = LEAST_ROWS,
    spatial_until: str | None = None,
    microbatches: int | None = None,
    schedule: Schedule = "1f1b",
    bytes_stage: int | None = None,
    precision: Precision | None = None,
    compile: bool | None = None,  # noqa: A002 - as in `parallelize`
) -> Plan:
    """A plan for training `model` on global batches like `sample` (a tensor or a shape; several in a list).

    Needs no process group. `strategy` is a preset's name, "auto", a mapping of layer names or patterns to splits, or a
    plan that was read from a file, which is checked and has its own mesh. "auto" takes the splits that are predicted to
    be fastest on `system`; with `gpus` in place of a mesh, the best mesh too. Ranks that have parts of the tokens
    gather all keys and values for attention, or with `attention="ring"` pass them round; "auto" takes what is predicted
    to be faster, or to fit. `sub_batches` parts of a batch travel one by one to dense layers that are cut over the
    axis that cuts samples. `checkpoint` names modules whose activations are computed again in backward. For slow links
    `compression` sums gradients in bfloat16 ("bf16") or in low rank ("powersgd-4"), which changes what is trained;
    `reduction="hierarchical"` sums them inside hosts of `ranks_per_host` ranks before they cross to others. A spatial
    strategy stops where a rank would have fewer than `least_rows` rows, or at the layer `spatial_until`. On a mesh with
    a pipe axis, layers go into stages of about equal predicted time, within `bytes_stage` of weights and activations if
    that is given, and the batch goes through them in `microbatches` (default: up to four a stage) by `schedule`. With
    `precision` "amp-bf16" or "amp-fp16" the step is planned as it runs under `torch.autocast`. With
    `compile` it is planned as `parallelize(..., compile=True)` runs it.
    """
    captured = network_of(model, sample)
    options = DraftOptions(
        batchnorm=batchnorm,
        checkpoint=tuple(checkpoint),
        reduction=reduction,
        compression=compression,
        ranks_per_host=ranks_per_host,
        attention=attention,
        sub_batches=sub_batches,
        preset=PresetOptions(least_rows=least_rows, spatial_until=spatial_until),
        stages=StageOptions(microbatches, schedule, bytes_stage),
        precision=precision or "",
        compile=bool(compile),
    )
    if isinstance(strategy, Plan) and gpus is None:
        bound = _bound(strategy, captured, mesh or strategy.mesh)
        bound = bound if precision is None else replace(bound, precision=precision)
        bound = bound if compile is None else replace(bound, compile=compile)
        return decided(captured, bound, _device_kind(system))
    if mesh is None or gpus is not None or isinstance(strategy, Plan):
        return _searched(captured, mesh, strategy, gpus, system, options)
    device = _device_kind(system)
    if strategy == "auto":
        return best_on(captured, mesh, system, options)
    return decided(captured, draft(captured, mesh, strategy, options, device), device)


def _device_kind(system: System | str | None) -> str:
    """The kind of device to plan for: the system's; without one, that of this job's ranks; without a job, GPUs."""
    if system is not None:
        return loaded(system).torch_device
    is_on_cpus = dist.is_initialized() and dist.get_backend() != "nccl"
    return "cpu" if is_on_cpus else "cuda"


def _searched(
    captured: Captured,
    mesh: Mesh | None,
    strategy: Strategy,
    gpus: int | None,
    system: System | str | None,
    options: DraftOptions,
) -> Plan:
    """The best plan on any mesh of `gpus` ranks."""
    if gpus is None or mesh is not None:
        raise PlanError("give `mesh`, such as cm.Mesh(data=2, height=2), or `gpus`, their number, and not both.")
    if not isinstance(strategy, str):
        raise PlanError(
            "`gpus` searches for the mesh, but a plan or a split for each layer needs its own: give `mesh`."
        )
    strategies = None if strategy == "auto" else (strategy,)
    return search_captured(captured, system, gpus, strategies=strategies, options=options).best.plan


def _bound(read: Plan, captured: Captured, mesh: Mesh) -> Plan:
    """A plan from a file, for a model."""
    if read.mesh != mesh:
        raise PlanError(f"the plan is for {read.mesh}, but `mesh` is {mesh}; leave `mesh` out.")
    read.check(captured.graph)
    shapes = tuple(node.outputs[0].shape for node in captured.graph.inputs)
    return replace(read, source=captured, shapes=shapes)
