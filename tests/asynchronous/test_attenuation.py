"""How much late work and bad work counts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convmesh.asynchronous.attenuation import attenuation, quality
from convmesh.asynchronous.global_weights import GlobalWeights

versions = st.lists(st.integers(0, 50), min_size=1, max_size=8)


@given(versions)
def test_attenuations_of_all_ranks_make_a_mean(held: list[int]) -> None:
    factors = [attenuation(version, held, max(held)) for version in held]
    assert sum(factors) == pytest.approx(1)
    assert sorted(factors) == [factor for _, factor in sorted(zip(held, factors, strict=True))]


@given(st.floats(0, 100), st.lists(st.floats(0, 100), max_size=5))
def test_the_best_rank_counts_whole_and_none_counts_more(loss: float, others: list[float]) -> None:
    found = quality(loss, [loss, *others])
    assert 0 < found <= 1
    assert (found == 1) == (loss <= min(others, default=loss)) or math.isclose(loss, min(others), abs_tol=1e-9)


def test_what_is_no_number_does_not_count() -> None:
    assert quality(math.nan, [0.1]) == 0
    assert quality(0.1, [math.nan, 0.1]) == 1
    weights = GlobalWeights(torch.zeros(2), 2)
    assert weights.add(0, torch.full((2,), math.nan), math.nan).tolist() == [0, 0]


def test_two_ranks_in_turn_make_the_mean_of_their_work() -> None:
    weights = GlobalWeights(torch.zeros(1), 2)
    weights.add(0, torch.tensor([1.0]), 0.5)
    newest = weights.add(1, torch.tensor([3.0]), 0.5)
    assert weights.staleness == [0, 1]
    late = math.exp(0) / (math.exp(0) + math.exp(1))  # it began at version 0, the other holds version 1
    assert newest.item() == pytest.approx(0.5 * 1 + late * 3)
