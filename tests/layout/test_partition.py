"""Cuts of one dim."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convmesh.errors import LayoutError
from convmesh.layout import Partition
from convmesh.testing.strategies import partitions

any_partition = st.tuples(st.integers(0, 20), st.integers(1, 8)).flatmap(lambda drawn: partitions(*drawn))


@settings(max_examples=100)
@given(any_partition)
def test_parts_are_a_disjoint_cover(partition: Partition) -> None:
    owned = [i for part in range(partition.parts) for i in range(*partition.span(part))]
    assert owned == list(range(partition.extent))


@settings(max_examples=100)
@given(st.integers(0, 50), st.integers(1, 9))
def test_even_parts_differ_by_one_at_most_and_larger_ones_come_first(extent: int, parts: int) -> None:
    partition = Partition.even(extent, parts)
    sizes = [partition.span(part).extent for part in range(parts)]
    assert sum(sizes) == extent
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert partition.is_even
    assert partition == Partition.of_sizes(sizes)


@settings(max_examples=100)
@given(any_partition, st.integers(0, 40))
def test_rescaling_keeps_shares_to_within_an_index(partition: Partition, extent: int) -> None:
    rescaled = partition.rescale(extent)
    assert (rescaled.extent, rescaled.parts) == (extent, partition.parts)
    if partition.is_even:
        assert rescaled.is_even
    elif partition.extent:
        exact = [bound * extent / partition.extent for bound in partition.bounds]
        assert all(abs(a - b) <= 0.5 for a, b in zip(exact, rescaled.bounds, strict=True))


def test_halving_and_doubling_bring_an_uneven_partition_back() -> None:
    partition = Partition((0, 4, 10, 16))
    assert partition.rescale(8) == Partition((0, 2, 5, 8))
    assert partition.rescale(8).rescale(16) == partition


def test_partitions_are_values() -> None:
    assert Partition((0, 1, 2)) == Partition.even(2, 2) != Partition((0, 2, 2))
    assert len({Partition([0, 1, 2]), Partition((0, 1, 2)), Partition.even(2, 2)}) == 1
    assert repr(Partition([0, 3, 5])) == "Partition((0, 3, 5))"


@pytest.mark.parametrize("bounds", [(), (0,), (1, 2), (0, 3, 2), (0, 1.5, 3), (-1, 2)])
def test_bad_bounds(bounds: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError) as raised:
        Partition(bounds)
    assert str(raised.value) == (
        f"`bounds` (={bounds}) must be whole numbers that start at 0 and never fall, e.g. (0, 6, 11, 16)."
    )


@pytest.mark.parametrize(("extent", "parts"), [(-1, 2), (4, 0), (4, -2)])
def test_bad_sizes(extent: int, parts: int) -> None:
    with pytest.raises(LayoutError) as raised:
        Partition.even(extent, parts)
    assert str(raised.value) == f"`extent` (={extent}) must not be negative, and `parts` (={parts}) at least 1."


def test_negative_sizes() -> None:
    with pytest.raises(LayoutError, match="never fall"):
        Partition.of_sizes([3, -1, 2])


@given(st.integers(0, 300), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_weighted_parts_are_nearest_to_their_weights(extent: int, weights: list[int]) -> None:
    partition = Partition.weighted(extent, weights)
    assert partition.extent == extent
    assert partition.parts == len(weights)
    for part, weight in enumerate(weights):
        assert abs(partition.span(part).extent - extent * weight / sum(weights)) <= 1
    assert Partition.weighted(extent * sum(weights), weights) == Partition.of_sizes([extent * n for n in weights])
