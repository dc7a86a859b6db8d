"""One rank of the plan's mesh: trains its part of the network and compares it with the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from convmesh.dist import open_mesh
from convmesh.dist.agreement import problems_of
from convmesh.errors import UnsupportedError
from convmesh.graph import Captured
from convmesh.graph.checking.drawn_values import cotangent
from convmesh.ops.elementwise.dropout import manual_seed
from convmesh.plans import Plan
from convmesh.private_torch import tree_leaves, tree_map
from convmesh.runtime import ParallelNet, parallelize
from convmesh.runtime.compiled.compiled_engine import CompiledEngine
from convmesh.runtime.direct_engine import DirectEngine
from convmesh.runtime.pipeline.pipeline_engine import PipelineEngine
from convmesh.runtime.placing import on_layout
from convmesh.verification.drawn_batch import DrawnBatch, in_precision
from convmesh.verification.few_steps import train
from convmesh.verification.observe import Comparer, Key, Watcher
from convmesh.verification.rank_place import RankPlace
from convmesh.verification.shrink import capture_quietly
from convmesh.verification.single_process import load
from convmesh.verification.troubles import told


def run_split(
    model: nn.Module,
    plan: Plan,
    batch: DrawnBatch,
    loss: Callable[..., Any] | None,
    folder: str,
    compiling: bool | str = False,
    place: RankPlace = RankPlace(),  # noqa: B008 - a frozen value
) -> dict[Key, float]:
    """The distances of this rank's tensors from those in `folder`.

    A plan without its captured network came from another process: the network is captured here, in this place's
    precision. A compiled step has no layers to watch: only losses, gradients and weights are compared.
    """
    values, rate = load(folder)
    comparer = Comparer(values)
    watcher = Watcher(comparer)
    with told(folder, watcher):
        device = place.taken()
        if plan.source is None:
            plan = replace(plan, source=_captured(model.to(place.dtype), batch, place))
        if isinstance(loss, nn.Module):
            loss = loss.to(device)
        mesh = open_mesh(plan.mesh, device=device)
        net = parallelize(model, plan, loss, mesh=mesh, check_loss=False, compile=compiling)
        manual_seed(mesh, 0)
        if isinstance(engine := net._running.engine, DirectEngine):
            watcher.attach(engine.module)
        inputs, target = _shards(net, batch, loss is not None, place.dtype)

        def step() -> torch.Tensor | None:
            return _backward(net, inputs, target, loss is not None)

        def note_gradients() -> None:
            gradients = net.full_gradients()
            for name, gradient in gradients.items():
                comparer.note(Key("weight gradient", name), gradient, ())
            comparer.note_missing("weight gradient", {*gradients})

        train(step, [*net.parameters()], lambda: rate, batch.steps, note_gradients, watcher, comparer)
        if compiling:
            _refuse_eager(net)
        for name, tensor in net.full_state_dict().items():
            comparer.note(Key("weight", name), tensor, ())
    return comparer.errors


def _refuse_eager(net: ParallelNet) -> None:
    """What ran eagerly says nothing about a compiled step."""
    engine = net._running.engine
    assert isinstance(engine, (CompiledEngine, PipelineEngine))
    here = "; ".join(engine.told) or None
    everyone = net.mesh.everyone  # each rank of a pipeline has reasons of its own
    reasons = [here] if everyone is None else problems_of(everyone, net.mesh.mesh.size, here)
    if any(reasons):
        raise UnsupportedError(f"`compile` cannot be verified: {'; '.join(filter(None, reasons))}. Verify without it.")


def _captured(model: nn.Module, batch: DrawnBatch, place: RankPlace) -> Captured:
    """Captured without a check: the run on one process has compared the captured network with the model."""
    return replace(capture_quietly(model, batch.samples, batch.shapes, place.dtype), unchecked="")


def _shards(net: ParallelNet, batch: DrawnBatch, has_target: bool, floats: torch.dtype) -> tuple[tuple[Any, ...], Any]:
    inputs = net.shard_input(*(in_precision(x, floats) for x in batch.inputs()))
    listed = inputs if isinstance(inputs, tuple) else (inputs,)
    target = tree_map(lambda t: in_precision(t, floats), batch.targets())
    return listed, net.shard_target(target) if has_target else None


def _backward(net: ParallelNet, inputs: tuple[Any, ...], target: Any, has_loss: bool) -> torch.Tensor | None:
    if has_loss:
        loss: torch.Tensor = net(*inputs, target)
        loss.backward()
        return loss
    outputs = [y for y in tree_leaves(net(*inputs)) if isinstance(y, torch.Tensor)]
    placed = [on_layout(y, None, net.mesh, "the output") for y in outputs]
    pairs = [(y.local, cotangent(i, y)[y.box.slices()].to(y.local)) for i, y in enumerate(placed) if y.requires_grad]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
    return None
