"""Weights of a dry run whose cut is not decided yet: they decide when they meet their input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from convmesh.layout import ExchangePlan, Layout
from convmesh.layout.channels import ChannelSplit
from convmesh.private_torch.tensor_internals import as_subclass_leaf

Plans = tuple[Layout, ExchangePlan, ExchangePlan]
Decide = Callable[[Any, Callable[[ChannelSplit], Plans], int], ChannelSplit]


class PlannedWeight(torch.Tensor):
    """A meta tensor of a whole weight with a rule that picks its cut from the input and the plans of each candidate."""

    decide: Decide | None
    """None: the weight is cut as the channels of its input are."""
    decided: ChannelSplit | None
    """What was decided."""

    @classmethod
    def of(cls, weight: torch.Tensor, decide: Decide | None = None) -> PlannedWeight:
        made = as_subclass_leaf(cls, torch.empty_like(weight, device="meta"), weight.requires_grad)
        made.decide, made.decided = decide, None
        return made
