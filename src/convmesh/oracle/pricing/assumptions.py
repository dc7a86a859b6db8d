"""What a prediction assumes about training, beyond the plan and the cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from convmesh.errors import PlanError, UnknownNameError

OptimizerName = Literal["sgd", "momentum", "adam"]

STATES = {"sgd": 0, "momentum": 1, "adam": 2}
"""Values that an optimiser keeps for each parameter, besides its gradient."""


JITTER = 0.01
"""A guess: equal GPUs differ by 1 to 2 % in clock rate and temperature, and hosts by their other work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Defaults are those of a plain training run."""

    optimizer: OptimizerName = "momentum"
    tf32: bool | None = None
    """Whether float32 products run on tensor cores; by default convolutions do and others do not, as in torch."""
    seconds_input: float = 0.0
    """Seconds to load one step's batch; loading is prefetched, so a step takes at least this long."""
    ranks_per_node: int | None = None
    """Ranks on each node; by default one for each device."""
    jitter: float = JITTER
    """Standard deviation of a rank's work from step to step, as a fraction of it."""

    def __post_init__(self) -> None:
        if self.optimizer not in STATES:
            raise UnknownNameError.of("optimizer", self.optimizer, STATES)
        for name in ("jitter", "seconds_input"):
            if not 0 <= getattr(self, name) < math.inf:
                raise PlanError(
                    f"`{name}` (={getattr(self, name)!r}) must not be negative; the default is {_DEFAULT[name]}."
                )


_DEFAULT = {"jitter": JITTER, "seconds_input": 0.0}
