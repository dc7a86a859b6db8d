"""Losses by name. All are exact over cut dims: they are torch's functions, or ours, on split tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from convmesh.errors import ConfigError, UnknownNameError
from convmesh.models.load import import_factory
from convmesh.ops import dice_loss

Loss = Callable[[Any, Any], Any]


def _dice_and_cross_entropy(scores: Any, target: Any) -> Any:
    return _dice(scores, target) + F.cross_entropy(scores, target)


_dice = partial(dice_loss, activation="softmax")

LOSSES: dict[str, Loss] = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
    "dice": _dice,
    "dice+cross_entropy": _dice_and_cross_entropy,
}


def loss_named(name: str, target: torch.dtype) -> Loss:
    """The loss of a run; "auto" is cross entropy for classes and mean squares for values."""
    if name == "auto":
        return F.mse_loss if target.is_floating_point else F.cross_entropy
    if ":" in name:
        return import_factory(name, "loss")
    if name not in LOSSES:
        raise ConfigError(str(UnknownNameError.of("loss", name, [*LOSSES, "auto"])))
    return LOSSES[name]
