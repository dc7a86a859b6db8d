"""Spans, boxes and regions against sets of indices."""

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from convmesh.layout import Box, Region, Span
from convmesh.layout.box import intersect_spans, merge

spans = st.builds(Span, st.integers(-9, 9), st.integers(-9, 9))
span_lists = st.lists(spans, max_size=4)
regions = st.lists(span_lists.map(merge), min_size=2, max_size=2).map(lambda dims: Region(tuple(dims)))


def members(*parts: Span) -> list[int]:
    return [i for span in parts for i in range(span.start, span.stop)]


def indices(region: Region) -> list[tuple[int, ...]]:
    """The indices of a region, in the order in which a tensor that holds it stores them."""
    return list(itertools.product(*(members(*dim) for dim in region.dims)))


@settings(max_examples=100)
@given(spans, spans, st.integers(-5, 5))
def test_spans_are_sets_of_indices(a: Span, b: Span, offset: int) -> None:
    assert a.extent == len(members(a))
    assert set(members(a.intersect(b))) == set(members(a)) & set(members(b))
    assert members(a.shift(offset)) == [i + offset for i in members(a)]


@given(spans, spans)
def test_an_empty_intersection_is_a_span_without_negative_extent(a: Span, b: Span) -> None:
    common = a.intersect(b)
    assert common.start <= common.stop


@settings(max_examples=100)
@given(span_lists)
def test_merge_is_the_sorted_union_in_as_few_spans_as_possible(parts: list[Span]) -> None:
    merged = merge(parts)
    assert members(*merged) == sorted(set(members(*parts)))
    assert all(a.stop < b.start for a, b in itertools.pairwise(merged))


@settings(max_examples=100)
@given(span_lists.map(merge), span_lists.map(merge))
def test_common_indices_of_span_lists(a: tuple[Span, ...], b: tuple[Span, ...]) -> None:
    assert members(*intersect_spans(a, b)) == sorted(set(members(*a)) & set(members(*b)))


def test_a_box_knows_shape_size_and_slices() -> None:
    box = Box((Span(2, 5), Span(4, 4), Span(1, 3)))
    assert box.shape == (3, 0, 2)
    assert box.size == 0
    assert box.slices() == (slice(2, 5), slice(4, 4), slice(1, 3))
    assert Box.whole((3, 4)) == Box((Span(0, 3), Span(0, 4)))


def test_boxes_intersect_and_move_dim_by_dim() -> None:
    box = Box((Span(2, 5), Span(0, 4)))
    assert box.intersect(Box((Span(3, 9), Span(1, 2)))) == Box((Span(3, 5), Span(1, 2)))
    assert box.relative_to(Box((Span(2, 9), Span(1, 2)))) == Box((Span(0, 3), Span(-1, 3)))


def test_a_box_is_a_region_and_an_empty_dim_has_no_spans() -> None:
    assert Region.of(Box((Span(2, 5), Span(4, 4)))) == Region(((Span(2, 5),), ()))


@settings(max_examples=100)
@given(regions, regions)
def test_regions_are_sets_of_indices(a: Region, b: Region) -> None:
    assert a.size == math.prod(a.shape) == len(indices(a))
    assert set(indices(a.intersect(b))) == set(indices(a)) & set(indices(b))


@settings(max_examples=100)
@given(regions, regions)
def test_compact_indices_find_a_region_in_a_tensor_that_holds_a_larger_one(inner: Region, outer: Region) -> None:
    inner = inner.intersect(outer)
    rows = [{index: place for place, index in enumerate(members(*dim))} for dim in outer.dims]
    expected = [tuple(row[i] for row, i in zip(rows, index, strict=True)) for index in indices(inner)]
    assert indices(inner.within(outer)) == expected
