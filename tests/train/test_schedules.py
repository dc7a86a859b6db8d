"""Learning rates are functions of the step, whatever happened before."""

import math

import pytest

from convmesh.train.run_config import ScheduleConfig
from convmesh.train.schedules import Schedule


def factors(steps_epoch: int, steps: int, **options: object) -> list[float]:
    schedule = Schedule(ScheduleConfig(**options), steps_epoch, steps)  # type: ignore[arg-type]
    return [schedule(step) for step in range(steps)]


def test_constant() -> None:
    assert factors(4, 8, name="constant") == [1.0] * 8


def test_cosine_falls_from_one_to_final() -> None:
    found = factors(5, 11, name="cosine", final=0.1)
    assert found[0] == 1.0
    assert found[5] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 5 / 11)) / 2)
    assert sorted(found, reverse=True) == found
    assert Schedule(ScheduleConfig(name="cosine", final=0.1), 5, 11)(50) == pytest.approx(0.1)


def test_warm_up_rises_linearly_and_the_shape_follows() -> None:
    found = factors(4, 20, name="polynomial", warmup_epochs=1.0)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4] == 1.0
    assert found[12] == pytest.approx(0.5)


def test_steps_fall_after_their_epochs() -> None:
    assert factors(2, 6, name="step", milestones=(1.0, 2.5), gamma=0.5) == [1, 1, 0.5, 0.5, 0.5, 0.25]


def test_a_length_of_its_own() -> None:
    assert factors(2, 8, name="polynomial", epochs=2.0) == [1.0, 0.75, 0.5, 0.25, 0, 0, 0, 0]
