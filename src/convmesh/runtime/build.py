"""From a model and a plan to a module that trains on this rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from convmesh.dist import OpenMesh, open_mesh
from convmesh.dist.heap import hand_back_freed_memory
from convmesh.dist.hosts import check_hosts
from convmesh.dist.meeting import telling_refusals
from convmesh.errors import PlanError
from convmesh.gradients.reducers import reducer_for
from convmesh.graph import Captured, capture, compared
from convmesh.lowering.channel_rules import replace_tensor
from convmesh.lowering.lower import lower
from convmesh.lowering.lowered import Lowered
from convmesh.plans import Plan
from convmesh.plans.transfer_order import first_difference, transfer_order
from convmesh.private_torch.dtensors import is_dtensor
from convmesh.runtime.compiled.compiled_engine import CompiledEngine
from convmesh.runtime.compiled.step_compiler import backend_of
from convmesh.runtime.direct_engine import DirectEngine, LossCheck
from convmesh.runtime.executor import executable
from convmesh.runtime.full_state import copy_from_first, is_materialised
from convmesh.runtime.net import Engine, ParallelNet, Running
from convmesh.runtime.pipeline.pipeline_engine import PipelineEngine
from convmesh.runtime.pipeline.stage_modules import stage_regions
from convmesh.runtime.pipeline.stage_weights import StageWeights
from convmesh.runtime.relowering import end_layouts

Loss = Callable[..., Any]


def parallelize(
    model: nn.Module,
    plan: Plan,
    loss: Loss | None = None,
    *,
    mesh: OpenMesh | None = None,
    check_loss: bool = True,
    compile: bool | str = False,  # noqa: A002 - as torch names it
) -> ParallelNet:
    """This rank's part of `model` under `plan`: call it on every rank of the job.

    The net uses the model's own parameters; weights that the plan cuts become DTensors. With `loss`, `net(x, target)`
    is the global loss, and after `backward()` every gradient equals a single device's. Every rank starts from the
    first one's weights. `mesh` is the plan's mesh if it is already open; it is not changed. `compile`
    traces the whole step once, from these same operators, runs its local parts through torch's compiler, and replays
    it; with "eager" it replays without a compiler, with "max-autotune" the compiler tries more kernels. On a GPU the
    step becomes CUDA graphs after two steps: from then on gradients have the same addresses in every step, so copy
    those that you keep. In a pipeline, each stage's part of a micro-batch is traced, and replayed without CUDA graphs.
    What cannot be traced or captured runs without it, and one line says why.
    `check_loss` ends a run whose loss is NaN with an error that names the step and the ranks to blame.
    """
    with telling_refusals():
        backend = backend_of(compile)
        captured = _captured(model, plan)
        plan.check(captured.graph)
    opened = _opened(plan, mesh)
    inside = opened.with_settings(opened.settings.for_plan(plan))
    lowered = lower(captured, plan, opened.rank, device=opened.device.type)
    decided = lowered.plan.splits, lowered.plan.pipeline, lowered.cuts, sorted(lowered.sum_axes.items())
    opened.agree("`parallelize`", str(decided))
    opened.agree_on_lists("the program's transfers", transfer_order(lowered.program), first_difference)
    hand_back_freed_memory()
    network = captured.without_weights()
    stages = None if plan.pipeline is None else StageWeights(model, captured, plan, opened)
    _bring_weights(model, opened, stages)
    _cut_weights(model, lowered, opened)
    if stages is None:
        layers = {node.node: node.layer for node in lowered.program.nodes}
        direct = DirectEngine(executable(captured, lowered, inside), opened, inside, loss, layers)
        engine: Engine = direct if backend is None else CompiledEngine(direct, backend)
    else:
        regions = stage_regions(captured, lowered, inside)
        engine = PipelineEngine(stages.captured, lowered, opened, loss, regions, backend)
    inputs, outputs = end_layouts(captured, lowered, engine.layout_of)
    running = Running(
        lowered=lowered,
        mesh=opened,
        engine=engine,
        reducer=reducer_for(model, lowered.sum_axes, opened, plan.summing) if is_materialised(model) else None,
        inputs=inputs,
        outputs=outputs,
        check=LossCheck(opened, ends_on_nan=check_loss),
        stages=stages,
        network=network,
        reads_weights=backend is not None or any(node.op == "get_attr" for node in captured.module.graph.nodes),
    )
    return ParallelNet(model, running)


def _opened(plan: Plan, mesh: OpenMesh | None) -> OpenMesh:
    """The plan's mesh, open."""
    if "pipe" in plan.mesh.axes and plan.pipeline is None:
        raise PlanError(f"{plan.mesh} has a pipe axis, but the plan has no [pipeline]; make it with `cm.plan`.")
    opened = mesh if mesh is not None else open_mesh(plan.mesh)
    opened.agree("the plan's mesh", str(plan.mesh))
    if opened.mesh.even != plan.mesh.even:
        raise PlanError(f"the plan is for {plan.mesh}, but `mesh` is {opened.mesh}.")
    check_hosts(opened, plan.ranks_per_host)
    return opened.cut_as(plan.mesh)


def _bring_weights(model: nn.Module, mesh: OpenMesh, stages: StageWeights | None) -> None:
    """Copy the first rank's weights to this rank's device; those of other stages are dropped first."""
    if stages is None and is_materialised(model):
        model.to(mesh.device)
    if is_materialised(model):
        copy_from_first(model, mesh)
    if stages is not None:
        stages.drop_others(model)
        if is_materialised(model):
            model.to(mesh.device)


def _captured(model: nn.Module, plan: Plan) -> Captured:
    """The network captured for the plan if it came from this very model; otherwise a new capture."""
    if any(is_dtensor(p) for p in model.parameters()):
        raise PlanError(
            "`model` has been cut already, by an earlier `parallelize`; make it anew and load `net.full_state_dict()`."
        )
    _check_devices(model)
    known = plan.source.of_model(model) if isinstance(plan.source, Captured) else None
    if known is not None:
        return compared(known, model)
    if not plan.shapes:
        raise PlanError("the plan names no `shapes` of inputs; make it with `cm.plan(model, sample, mesh)`.")
    return capture(model, *plan.shapes)


def _check_devices(model: nn.Module) -> None:
    """Refuse a model with only some of its weights on the meta device: a rank could not tell whether to draw them."""
    places = {name: tensor.is_meta for name, tensor in model.named_parameters()}
    empty, filled = (next((n for n, is_meta in places.items() if is_meta is wanted), "") for wanted in (True, False))
    if empty and filled:
        raise PlanError(
            f"`model` has {empty!r} on the meta device, but {filled!r} is not; make all of it there, or none: "
            "`model.to_empty(device=...)` and load its weights, or `with torch.device('meta')`."
        )


def _cut_weights(model: nn.Module, lowered: Lowered, mesh: OpenMesh) -> None:
    """Replace whole weights by this rank's shards; a weight shared by two layers stays shared."""
    known: dict[int, tuple[Any, str]] = {}
    for name, cuts in lowered.cuts.items():
        path, _, tensor = name.rpartition(".")
        owner = model.get_submodule(path)
        whole = getattr(owner, tensor, None)
        _, first = known.setdefault(id(whole), (whole, name))
        if first == name or whole is None:
            replace_tensor(owner, tensor, mesh, cuts, lowered.blocks.get(name, 1))
        elif lowered.cuts[first] == cuts and lowered.blocks.get(first) == lowered.blocks.get(name):
            setattr(owner, tensor, _tensor_at(model, first))
        else:
            raise PlanError(
                f"{first!r} and {name!r} are one weight, but the plan cuts it in two ways; split both alike."
            )


def _tensor_at(model: nn.Module, name: str) -> Any:
    path, _, tensor = name.rpartition(".")
    return getattr(model.get_submodule(path), tensor)
