"""The windows of adaptive pooling against torch's own."""

import itertools

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from convmesh.layout import Span
from convmesh.layout.adaptive import Adaptive, unrolled

extents = st.integers(1, 40)


@settings(max_examples=200)
@given(extent=extents, out=extents)
def test_windows_are_those_of_torch(extent: int, out: int) -> None:
    (read,) = torch.autograd.functional.jacobian(
        lambda x: F.adaptive_avg_pool1d(x.view(1, 1, -1), out).view(-1), (torch.zeros(extent),)
    )
    for o, window in enumerate(Adaptive(out).windows(Span(0, out), extent)):
        assert read[o].nonzero().flatten().tolist() == list(range(*window))


@settings(max_examples=200)
@given(extent=extents, out=extents, data=st.data())
def test_needs_is_the_union_of_windows(extent: int, out: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, out - 1))
    part = Span(start, data.draw(st.integers(start + 1, out)))
    adaptive = Adaptive(out)
    indices = {i for window in adaptive.windows(part, extent) for i in range(*window)}
    assert [set(range(*span)) for span in adaptive.needs(part, extent)] == [indices]
    assert adaptive.out_extent(extent) == out


@settings(max_examples=200)
@given(extent=extents, out=extents)
def test_regular_windows_are_adjacent(extent: int, out: int) -> None:
    windows = Adaptive(out).windows(Span(0, out), extent)
    side_by_side = all(a.stop == b.start for a, b in itertools.pairwise(windows))
    assert Adaptive(out).is_regular(extent) == (side_by_side and len({w.extent for w in windows}) == 1)


def test_unrolled_windows_have_one_length() -> None:
    assert unrolled([Span(0, 2), Span(1, 4), Span(3, 5)]) == [0, 1, None, 1, 2, 3, 3, 4, None]


def test_no_output_has_no_windows() -> None:
    assert Adaptive(0).windows(Span(0, 0), 5) == []
    assert not Adaptive(0).is_regular(5)
