"""Weights of a dry run whose cut is decided only when they meet their input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from convmesh.layout.channels import ChannelPlans, ChannelSplit
from convmesh.private_torch.tensor_internals import as_subclass_leaf, no_overrides

Decide = Callable[[Any, Callable[[ChannelSplit], ChannelPlans], int, int], ChannelSplit]
"""Takes an input, the plans of each candidate, the number of groups and the channel dim."""


class PlannedWeight(torch.Tensor):
    """A meta tensor for a whole weight, with a rule that picks its cut from the input and each candidate's plans."""

    decide: Decide | None
    """None: the weight is cut as its input's channels are."""
    decided: ChannelSplit | None
    """The cut that was chosen."""
    __torch_function__ = no_overrides
    """Results computed from it are not planned weights, so torch need not ask in Python, as a quarter of runs do."""

    @classmethod
    def of(cls, weight: torch.Tensor, decide: Decide | None = None) -> PlannedWeight:
        planned = as_subclass_leaf(cls, torch.empty_like(weight, device="meta"), weight.requires_grad)
        planned.decide, planned.decided = decide, None
        return planned
