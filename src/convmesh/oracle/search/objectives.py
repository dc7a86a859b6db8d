"""The quantities that a search can minimise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from convmesh.errors import PlanError, UnknownNameError
from convmesh.oracle.prediction import Prediction


@dataclass(frozen=True, slots=True)
class Objective:
    """A quantity of predictions to minimise, and its unit."""

    name: str
    unit: str
    of: Callable[[Prediction], float]


def objective(name: str, batch: int, samples: int | None = None) -> Objective:
    """The objective called `name`; an epoch has `samples` samples, in steps of `batch`."""
    objectives = {
        "time": Objective("time", "s", lambda p: p.seconds_step),
        "epoch": Objective("epoch", "s", lambda p: p.seconds_step * steps_of(samples or batch, batch)),
        "memory": Objective("memory", "B", lambda p: p.bytes_memory),
        "energy": Objective("energy", "J", lambda p: p.joules_step),
        "cost": Objective("cost", "$", dollars_step),
    }
    if name not in objectives:
        raise UnknownNameError.of("objective", name, objectives)
    if samples is not None and samples < 1:
        raise PlanError(f"`samples` (={samples}) must be the positive number of samples of an epoch.")
    return objectives[name]


def steps_of(samples: int, batch: int) -> int:
    """Steps of an epoch; the last may be short."""
    return math.ceil(samples / batch)


def dollars_step(prediction: Prediction) -> float:
    """The price of a mesh's nodes for one step."""
    dollars = prediction.energy.dollars
    if dollars is None:
        raise PlanError(
            f"`objective` (='cost') needs a price, but system {prediction.system.name!r} has none; "
            "give [node] a dollars_per_hour, or minimise energy."
        )
    return dollars
