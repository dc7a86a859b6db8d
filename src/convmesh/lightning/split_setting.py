"""From the user's settings to a split module: the network, its inputs, its plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from convmesh.dist import open_mesh
from convmesh.errors import PlanError, UnsupportedError
from convmesh.layout import Mesh
from convmesh.lightning.first_batch import first_batch, inputs_of_step
from convmesh.lightning.lightning_package import part
from convmesh.lightning.split_module import Outputs, SplitModule, network_of
from convmesh.plans import Plan
from convmesh.plans.plan_text import dumps
from convmesh.private_torch import tree_map
from convmesh.runtime import parallelize
from convmesh.runtime.full_state import copy_from_first
from convmesh.train.planned import decided_plan, shared_plan
from convmesh.train.run_config import PlanConfig
from convmesh.train.shared_fate import together

PlanSource = str | Path | Plan

_seeds: Any = part("utilities.seed")

_LOOPS = {
    "fit": ("fit_loop", "train_dataloader", "training_step"),
    "validate": ("validate_loop", "val_dataloaders", "validation_step"),
    "test": ("test_loop", "test_dataloaders", "test_step"),
    "predict": ("predict_loop", "predict_dataloaders", "predict_step"),
}
"""By what a trainer does: its loop, its loaders, and the name of the module's step."""


@dataclass
class SplitSetting:
    """The arguments of a strategy. A plan is made once for each network and shape."""

    plan: PlanSource
    mesh: Mesh | None
    network: str | None
    outputs: Outputs
    sample: Any
    _texts: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.outputs not in ("cut", "whole"):
            raise PlanError(f"`outputs` (={self.outputs!r}) must be 'cut' or 'whole'.")
        if not isinstance(self.plan, str | Path | Plan):
            raise PlanError(
                f"`plan` (={self.plan!r:.60}) must be 'auto', a preset such as 'data+spatial', a plan file, or a plan."
            )
        if self.mesh is not None and (isinstance(self.plan, Plan) or str(self.plan).endswith(".toml")):
            raise PlanError("`mesh` is for presets and 'auto': a plan has its own; leave `mesh` out.")

    def split(self, module: nn.Module, strategy: Any) -> SplitModule:
        """Split the network of `module` over the ranks of the job.

        Random numbers are drawn only as Lightning's own loop would, so samples come in the order of one process.
        """
        if self.sample is None:
            loop, *_ = _loop_of(module)
            loop.setup_data()
        with _seeds.isolate_rng():
            with together():
                network, name = network_of(module, self.network)
                sample = self._sample(module, network, name, strategy)
            plan = self._decided(network, sample)
            mesh = open_mesh(plan.mesh)
            copy_from_first(module, mesh)
            return SplitModule(module, network, parallelize(network, plan, mesh=mesh), self.outputs)

    def _sample(self, module: nn.Module, network: nn.Module, name: str, strategy: Any) -> list[Any]:
        if self.sample is not None:
            return self.sample if isinstance(self.sample, list) else [self.sample]
        _, loader, step = _loop_of(module)
        if step != "training_step" and isinstance(loader, list | tuple):
            loader = loader[0]
        batch = module.on_before_batch_transfer(first_batch(loader), 0)  # type: ignore[operator]
        batch = strategy.batch_to_device(strategy.precision_plugin.convert_input(batch))
        shown = f"the network {name!r}" if name else "`forward`"
        return list(inputs_of_step(getattr(module, step), batch, module, network, shown))

    def _decided(self, network: nn.Module, sample: list[Any]) -> Plan:
        """The plan as the first rank decides it, since it may measure this machine."""
        shapes = tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in sample)
        key = (id(network), shapes)
        with together():
            if key not in self._texts and dist.get_rank() == 0:
                self._texts[key] = self._text(network, sample)
        plan = shared_plan(self._texts.get(key), network, tree_map(_detached, sample))
        with together():
            check_plan(plan)
        return plan

    def _text(self, network: nn.Module, sample: list[Any]) -> str:
        if isinstance(self.plan, Plan):
            return dumps(self.plan)
        axes = {} if self.mesh is None else dict(self.mesh.axes)
        config = PlanConfig(strategy=str(self.plan), mesh=axes, predict=False)
        return decided_plan(config, network, sample, dist.get_world_size())


def _loop_of(module: nn.Module) -> tuple[Any, Any, str]:
    """The loop that a trainer runs, its loaders so far, and the name of the module's step."""
    trainer: Any = module.trainer
    loop, loaders, step = _LOOPS[trainer.state.fn.value]
    return getattr(trainer, loop), getattr(trainer, loaders), step


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


def check_plan(plan: Plan) -> None:
    """Refuse what does not fit into a trainer's loop."""
    if "pipe" in plan.mesh.axes:
        raise UnsupportedError(
            f"the plan on {plan.mesh} is a pipeline, which computes the loss itself; in Lightning `training_step` "
            "does. Use a plan without a pipe axis, or `cm.Trainer`."
        )
    if plan.reduction not in ("bucketed", "hierarchical"):
        raise UnsupportedError(
            f"the plan's reduction (={plan.reduction!r}) needs optimisers made by `net.optimizer`, but "
            "`configure_optimizers` makes its own; use reduction='bucketed', or `cm.Trainer`."
        )
