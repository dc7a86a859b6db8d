"""How weight gradients are summed over ranks: where, and how much of them travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from convmesh.errors import PlanError

Reduction = Literal["bucketed", "sharded", "broadcast", "hierarchical"]
Compression = Literal["none", "bf16", "powersgd-1", "powersgd-2", "powersgd-4", "powersgd-8"]

LOW_RANK = "powersgd-"
"""Followed by the rank of what travels in place of a weight's gradient."""


@dataclass(frozen=True, slots=True)
class Summing:
    """A plan's choice."""

    reduction: Reduction = "bucketed"
    compression: Compression = "none"
    ranks_per_host: int = 1
    """For a hierarchical reduction, which sums inside hosts first; 1 for the others."""

    def __post_init__(self) -> None:
        if self.reduction not in get_args(Reduction):
            raise PlanError(f"`reduction` (={self.reduction!r}) must be one of {', '.join(get_args(Reduction))}.")
        if self.compression not in get_args(Compression):
            raise PlanError(f"`compression` (={self.compression!r}) must be one of {', '.join(get_args(Compression))}.")
        if not isinstance(self.ranks_per_host, int) or self.ranks_per_host < 1:
            raise PlanError(f"`ranks_per_host` (={self.ranks_per_host!r}) must be a positive whole number.")
        if (self.reduction == "hierarchical") != (self.ranks_per_host > 1):
            raise PlanError(
                f"`reduction` (={self.reduction!r}) does not go with `ranks_per_host` (={self.ranks_per_host}): "
                "'hierarchical' needs the number of ranks on each host, 2 or more; leave it out for the others."
            )
        if self.low_rank and self.reduction != "bucketed":
            raise PlanError(
                f"`compression` (={self.compression!r}) needs `reduction` 'bucketed' (it is {self.reduction!r}): every "
                "rank makes the sum from its factors; or use `compression` 'bf16', which any reduction takes."
            )

    @property
    def low_rank(self) -> int:
        """The rank of what travels; 0 where gradients travel whole."""
        return int(self.compression.removeprefix(LOW_RANK)) if self.compression.startswith(LOW_RANK) else 0
