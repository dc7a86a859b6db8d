"""What a prediction takes for granted about training, beside the plan and the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from convmesh.errors import UnknownNameError

OptimizerName = Literal["sgd", "momentum", "adam"]

STATES = {"sgd": 0, "momentum": 1, "adam": 2}
"""Numbers that an optimiser keeps for each parameter, beside the parameter and its gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Defaults are those of a plain training run."""

    optimizer: OptimizerName = "momentum"
    tf32: bool = False
    """Whether float32 convolutions run on tensor cores."""
    seconds_input: float = 0.0
    """What loading one step's batch takes a rank; it is prefetched, so a step takes at least that."""
    ranks_per_node: int | None = None
    """Ranks on each node, if not one a device."""

    def __post_init__(self) -> None:
        if self.optimizer not in STATES:
            raise UnknownNameError.of("optimizer", self.optimizer, STATES)
