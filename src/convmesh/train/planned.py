"""The plan of a run and what it is predicted to cost: decided by the first rank, the same on all."""

from __future__ import annotations

import contextlib
import fnmatch
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from convmesh.dist.hosts import hosts_of_job, ranks_on_each
from convmesh.dist.told_values import value_of
from convmesh.errors import ConfigError, ConvMeshError, UnknownNameError
from convmesh.layout import Mesh
from convmesh.measure.device_figures import measure_device
from convmesh.measure.local_system import local_system
from convmesh.measure.machine import this_machine
from convmesh.oracle import Assumptions, Prediction
from convmesh.planner import plan as make_plan
from convmesh.planner import predict
from convmesh.planner.drafting import Sample
from convmesh.plans import Plan, load_plan
from convmesh.plans.default_mesh import mesh_for
from convmesh.plans.plan import Precision
from convmesh.plans.plan_file import loads
from convmesh.plans.plan_text import dumps
from convmesh.supervise.following import wanted_ranks
from convmesh.system import System
from convmesh.system.folder import LOCAL, user_systems
from convmesh.train.field_spellings import planned_precision
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


def check_plan(plan: PlanConfig, model: nn.Module, ranks: int, wanted: int | None) -> None:
    """Refuse plan settings that no network or no number of ranks could follow."""
    size = math.prod(plan.mesh.values())
    if plan.mesh and size != ranks == (wanted or ranks):  # a run that lost ranks gets another mesh
        raise ConfigError(
            f"`plan.mesh` (={plan.mesh}) is of {size} ranks, but {ranks} run; start them with `--ranks {size}`, or "
            "leave the mesh out."
        )
    modules = [name for name, _ in model.named_modules() if name]
    for pattern in plan.recompute:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in modules):
            raise ConfigError(str(UnknownNameError.of("plan.recompute", pattern, modules)))


def on_hosts_of_job(config: PlanConfig) -> PlanConfig:
    """A hierarchical reduction for this job's hosts, or an ordinary one unless every host has the same number of
    ranks, at least two. All ranks call it."""
    if config.reduction != "hierarchical" or config.ranks_per_host:
        return config
    ranks = ranks_on_each(hosts_of_job())
    known = {"ranks_per_host": ranks} if ranks > 1 else {"reduction": "bucketed"}
    return config.model_copy(update=known)


def decide(config: RunConfig, model: nn.Module, shape: Shape, ranks: int) -> Planned:
    """Make the plan and predict its step. Only the first rank does this; the others wait for `shared_plan`."""
    *others, last = plans_for(config.plan, ranks, wanted_ranks(), len(shape) - 2)
    for plan in others:
        with contextlib.suppress(ConvMeshError):
            return _decided(config, plan, model, shape, ranks)
    return _decided(config, last, model, shape, ranks)


def _decided(config: RunConfig, plan: PlanConfig, model: nn.Module, shape: Shape, ranks: int) -> Planned:
    system = _system_for(plan, ranks)
    made = made_plan(plan, model, shape, ranks, system, planned_precision(config.precision), _is_fused(config))
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
    """The plan with which every rank trains the whole network."""
    reason = "ranks train on their own (`sync` is async): there is no common step"
    return Planned(dumps(make_plan(model, shape, Mesh(), "data")), unpredicted=reason)


def shared_plan(text: str | None, model: nn.Module, shape: Sample) -> Plan:
    """The first rank's plan, bound to this rank's model."""
    told: Any = value_of(0, text) if dist.get_world_size() > 1 else text
    return make_plan(model, shape, strategy=loads(told), system=None)


def system_named(name: str) -> System:
    """A system by name or file; "auto" is this machine, as calibrated, or else as measured within a second."""
    if name != "auto":
        return System.load(name)
    if LOCAL in user_systems():
        return System.load(LOCAL)
    machine = this_machine()
    return local_system(machine, measure_device(machine, quick=True))


def _system_for(config: PlanConfig, ranks: int) -> System | None:
    needed = config.predict or (config.strategy == "auto" and ranks > 1)
    return system_named(config.system) if needed else None


def decided_plan(config: PlanConfig, model: nn.Module, sample: Sample, ranks: int) -> str:
    """The plan that a run file's section describes, as a plan file."""
    return dumps(made_plan(config, model, sample, ranks, _system_for(config, ranks)))


def _is_fused(config: RunConfig) -> bool:
    """Whether a compiler fuses the run's steps into kernels."""
    return bool(config.compile) and config.compile != "eager"


def made_plan(
    config: PlanConfig,
    model: nn.Module,
    shape: Sample,
    ranks: int,
    system: System | None,
    precision: Precision = "",
    compile: bool = False,  # noqa: A002 - as in `parallelize`
) -> Plan:
    """The plan that a run file's section describes."""
    options: dict[str, Any] = {
        "batchnorm": config.batchnorm,
        "reduction": config.reduction,
        "compression": config.compression,
        "ranks_per_host": config.ranks_per_host or 1,
        "checkpoint": config.recompute,
        "precision": precision,
        "compile": compile,
    }
    if config.strategy.endswith(".toml"):
        return make_plan(model, shape, strategy=load_plan(config.strategy), precision=precision, compile=compile)
    mesh = Mesh(**config.mesh) if config.mesh else None
    if config.strategy != "auto":
        chosen = mesh or mesh_for(config.strategy, ranks, _dims(shape) - 2)
        return make_plan(model, shape, chosen, config.strategy, **options)
    if ranks == 1:
        return make_plan(model, shape, Mesh(), "data", **options)
    if mesh is not None:
        return make_plan(model, shape, mesh, "auto", system=system, **options)
    return make_plan(model, shape, gpus=ranks, system=system, **options)


def _dims(sample: Sample) -> int:
    """The number of dims of the first input."""
    first = sample[0] if isinstance(sample, list) else sample
    return first.dim() if isinstance(first, torch.Tensor) else len(first)
