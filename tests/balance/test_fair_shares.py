"""Shares from measured seconds: a pure function, without processes."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convmesh.balance.fair_shares import Dealing, MovePolicy, next_dealing, unit_count
from convmesh.errors import ConfigError
from convmesh.layout import Mesh

speeds = st.lists(st.floats(0.2, 5.0), min_size=2, max_size=6)


def measured(dealing: Dealing, speed: list[float], fixed: float = 0.0) -> list[float]:
    """What ranks of these speeds need for their work, each step with a fixed part."""
    return [fixed + work / v for work, v in zip(dealing.work, speed, strict=True)]


def settled(dealing: Dealing, speed: list[float], fixed: float = 0.0) -> tuple[Dealing, int]:
    """The dealing from which nothing moves any more, and the number of moves."""
    for moves in range(20):
        seconds = measured(dealing, speed, fixed)
        then = next_dealing(dealing, seconds, seconds)
        if then is None:
            return dealing, moves
        dealing = then
    raise AssertionError(f"does not settle: {dealing}")


@given(speeds, st.integers(16, 512))
def test_every_unit_is_dealt_and_every_rank_has_one(speed: list[float], extent: int) -> None:
    start = Dealing.of(Mesh(data=len(speed)), {"data": extent})
    then = next_dealing(start, measured(start, speed)) or start
    assert sum(then.units["data"]) == sum(start.units["data"]) == unit_count(extent, len(speed))
    assert min(then.units["data"]) >= 1


@settings(max_examples=100)
@given(speeds, st.floats(0, 20))
def test_shares_settle_near_the_best_step(speed: list[float], fixed: float) -> None:
    """With a part that no share changes too: each measurement corrects what the one before left."""
    start = Dealing.of(Mesh(data=len(speed)), {"data": 960})
    least = MovePolicy().least_gain
    found, _ = settled(start, speed, fixed)
    average = sum(start.units["data"]) / len(speed)
    capped = max(found.units["data"]) >= int(2 * average)
    ideal = fixed + sum(start.units["data"]) / sum(speed)
    coarse = max(1 / v for v in speed)  # one unit of the slowest rank
    assert capped or max(measured(found, speed, fixed)) <= (ideal + coarse) / (1 - least) / (1 - least)


def test_a_rank_at_a_third_of_its_speed_gets_a_third_at_once() -> None:
    start = Dealing.of(Mesh(data=2), {"data": 32})
    then = next_dealing(start, [0.1, 0.3])
    assert then is not None
    assert then.units == {"data": (24, 8)}


def test_noise_of_a_few_per_cent_moves_nothing() -> None:
    draws = random.Random(0)
    start = Dealing.of(Mesh(data=4, height=2), {"data": 64, "height": 512})
    for _ in range(200):
        earlier, seconds = ([draws.gauss(0.2, 0.004) for _ in range(8)] for _ in range(2))
        assert next_dealing(start, seconds, earlier) is None


def test_small_gains_must_show_twice() -> None:
    start = Dealing.of(Mesh(data=2), {"data": 64})
    assert next_dealing(start, [1.0, 1.3]) is None
    assert next_dealing(start, [1.0, 1.3], earlier=[1.3, 1.0]) is None
    assert next_dealing(start, [1.0, 1.3], earlier=[1.0, 1.0]) is None
    then = next_dealing(start, [1.0, 1.3], earlier=[1.0, 1.24])
    assert then is not None
    assert then.units == {"data": (18, 14)}


def test_no_share_exceeds_its_limit_of_memory() -> None:
    start = Dealing.of(Mesh(height=4), {"height": 512})
    then = next_dealing(start, [0.1, 0.9, 0.9, 0.9], policy=MovePolicy(most=1.5, whole_gain=0.1))
    assert then is not None
    assert then.units["height"][0] == 24


def test_slow_ranks_of_a_grid() -> None:
    """Slabs are a product of axes. One slow rank halves the step by one axis; two on a diagonal are past help."""
    start = Dealing.of(Mesh(data=2, height=2), {"data": 32, "height": 128})
    seconds = {}
    for speed in ((1.0, 1.0, 1.0, 0.33), (1.0, 0.5, 1.0, 0.25), (0.5, 1.0, 1.0, 0.5)):
        found, _ = settled(start, [*speed])
        seconds[speed] = max(measured(found, [*speed])) / max(measured(start, [*speed]))
    assert [*seconds.values()] == pytest.approx([0.5, 0.5, 1.0], abs=0.07)


@pytest.mark.parametrize(
    ("extent", "ranks", "units"), [(512, 2, 32), (512, 8, 128), (30, 2, 30), (4096, 4, 64), (7, 2, 7)]
)
def test_units_divide_the_extent(extent: int, ranks: int, units: int) -> None:
    assert unit_count(extent, ranks) == units


def test_a_policy_names_its_limits() -> None:
    with pytest.raises(ConfigError, match="`least_gain`"):
        MovePolicy(least_gain=0)
    with pytest.raises(ConfigError, match="`most`"):
        MovePolicy(most=1)
