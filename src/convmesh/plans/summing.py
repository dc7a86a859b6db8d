"""How weight gradients are summed over ranks: where, and what of them travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from convmesh.errors import PlanError

Reduction = Literal["bucketed", "sharded", "broadcast"]
Compression = Literal["none", "bf16", "powersgd-1", "powersgd-2", "powersgd-4", "powersgd-8"]

LOW_RANK = "powersgd-"
"""Followed by the rank of what travels in place of a weight's gradient."""


@dataclass(frozen=True, slots=True)
class Summing:
    """A plan's choice."""

    reduction: Reduction = "bucketed"
    compression: Compression = "none"

    def __post_init__(self) -> None:
        if self.reduction not in get_args(Reduction):
            raise PlanError(f"`reduction` (={self.reduction!r}) must be one of {', '.join(get_args(Reduction))}.")
        if self.compression not in get_args(Compression):
            raise PlanError(f"`compression` (={self.compression!r}) must be one of {', '.join(get_args(Compression))}.")
        if self.low_rank and self.reduction != "bucketed":
            raise PlanError(
                f"`compression` (={self.compression!r}) needs `reduction` 'bucketed' (it is {self.reduction!r}): every "
                "rank makes the sum from its factors; or use `compression` 'bf16', which any reduction takes."
            )

    @property
    def low_rank(self) -> int:
        """The rank of what travels; 0 where gradients travel whole."""
        return int(self.compression.removeprefix(LOW_RANK)) if self.compression.startswith(LOW_RANK) else 0
