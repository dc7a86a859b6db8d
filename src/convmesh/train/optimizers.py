"""Optimisers by the words of a run file."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from convmesh.gradients import LAMB, LARS
from convmesh.runtime import ParallelNet
from convmesh.train.run_config import OptimizerConfig

KINDS: dict[str, type[Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "lars": LARS, "lamb": LAMB}

OPTIONS = {
    "sgd": ("lr", "momentum", "nesterov", "weight_decay"),
    "adamw": ("lr", "betas", "eps", "weight_decay"),
    "lars": ("lr", "momentum", "trust", "weight_decay"),
    "lamb": ("lr", "betas", "eps", "weight_decay"),
}
"""Fields of the configuration that each optimiser takes."""

ASSUMED = {"sgd": "momentum", "adamw": "adam", "lars": "momentum", "lamb": "adam"}
"""What the oracle treats each one as."""


def optimizer_for(net: ParallelNet, config: OptimizerConfig) -> Optimizer:
    """The optimiser of this rank's weights; those of one dim may be exempt from decay and from layer-wise scaling."""
    options = {name: getattr(config, name) for name in OPTIONS[config.name]}
    return net.optimizer(KINDS[config.name], _groups(net, config), **options)


def _groups(net: ParallelNet, config: OptimizerConfig) -> list[dict[str, Any]]:
    parameters = [p for p in net.parameters() if p.requires_grad]
    plain: dict[str, Any] = {"weight_decay": 0.0} | ({"adapt": False} if config.name in ("lars", "lamb") else {})
    if config.decay_vectors or (not config.weight_decay and "adapt" not in plain):
        return [{"params": parameters}]
    wide = {"params": [p for p in parameters if p.dim() > 1]}
    thin = {"params": [p for p in parameters if p.dim() <= 1], **plain}
    return [group for group in (wide, thin) if group["params"]]
