"""The plan of a run and what it is predicted to cost: decided by the first rank, the same on all."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from convmesh.errors import ConvMeshError
from convmesh.layout import Mesh
from convmesh.measure.device_figures import measure_device
from convmesh.measure.local_system import local_system
from convmesh.measure.machine import this_machine
from convmesh.oracle import Assumptions, Prediction
from convmesh.planner import plan as make_plan
from convmesh.planner import predict
from convmesh.plans import Plan, load_plan
from convmesh.plans.default_mesh import mesh_for
from convmesh.plans.plan_file import loads
from convmesh.plans.plan_text import dumps
from convmesh.supervise.following import wanted_ranks
from convmesh.system import System
from convmesh.system.folder import LOCAL, user_systems
from convmesh.train.optimizers import ASSUMED
from convmesh.train.replanning import plans_for
from convmesh.train.run_config import PlanConfig, RunConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Planned:
    """The first rank's decision."""

    text: str
    """The plan, as its file."""
    prediction: Prediction | None = None
    unpredicted: str = ""
    """Why there is no prediction."""


def decide(config: RunConfig, model: nn.Module, shape: Shape, ranks: int) -> Planned:
    """Make the plan and predict its step. Only the first rank does this; the others wait for `shared_plan`."""
    *others, last = plans_for(config.plan, ranks, wanted_ranks(), len(shape) - 2)
    for plan in others:
        with contextlib.suppress(ConvMeshError):
            return _decided(config, plan, model, shape, ranks)
    return _decided(config, last, model, shape, ranks)


def _decided(config: RunConfig, plan: PlanConfig, model: nn.Module, shape: Shape, ranks: int) -> Planned:
    system = system_named(plan.system) if _needs_system(plan, ranks) else None
    made = _made(plan, model, shape, ranks, system)
    if system is None or not plan.predict:
        return Planned(dumps(made), unpredicted="`plan.predict` is false")
    if system.node.turns(ranks) > 1:
        cores = int(system.node.cores or ranks)
        return Planned(
            dumps(made),
            unpredicted=f"{ranks} ranks take turns on {cores} cores, in an order that nobody knows beforehand",
        )
    try:
        assumed = Assumptions(optimizer=ASSUMED[config.optimizer.name])  # type: ignore[arg-type]
        return Planned(dumps(made), predict(made, system, assumed))
    except ConvMeshError as error:
        return Planned(dumps(made), unpredicted=str(error))


def alone(model: nn.Module, shape: Shape) -> Planned:
    """Every rank trains the whole network."""
    reason = "ranks train on their own (`sync` is async): there is no common step"
    return Planned(dumps(make_plan(model, shape, Mesh(), "data")), unpredicted=reason)


def shared_plan(text: str | None, model: nn.Module, shape: Shape) -> Plan:
    """The first rank's plan, bound to this rank's model."""
    told: list[Any] = [text]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(told, src=0)
    return make_plan(model, shape, strategy=loads(told[0]), system=None)


def system_named(name: str) -> System:
    """A system by name or file; "auto" is this machine, as calibrated, else as a second of measuring shows it."""
    if name != "auto":
        return System.load(name)
    if LOCAL in user_systems():
        return System.load(LOCAL)
    machine = this_machine()
    return local_system(machine, measure_device(machine, quick=True))


def _needs_system(config: PlanConfig, ranks: int) -> bool:
    return config.predict or (config.strategy == "auto" and ranks > 1)


def _made(config: PlanConfig, model: nn.Module, shape: Shape, ranks: int, system: System | None) -> Plan:
    options: dict[str, Any] = {
        "batchnorm": config.batchnorm,
        "reduction": config.reduction,
        "checkpoint": config.recompute,
    }
    if config.strategy.endswith(".toml"):
        return make_plan(model, shape, strategy=load_plan(config.strategy))
    mesh = Mesh(**config.mesh) if config.mesh else None
    if config.strategy != "auto":
        chosen = mesh or mesh_for(config.strategy, ranks, len(shape) - 2)
        return make_plan(model, shape, chosen, config.strategy, **options)
    if ranks == 1:
        return make_plan(model, shape, Mesh(), "data", **options)
    if mesh is not None:
        return make_plan(model, shape, mesh, "auto", system=system, **options)
    return make_plan(model, shape, gpus=ranks, system=system, **options)
