"""Slabs of outputs and inputs, against windows listed one by one."""

from hypothesis import assume, given
from hypothesis import strategies as st

from convmesh.layout.box import Span
from convmesh.layout.maps import Window
from convmesh.layout.slabs import input_slabs, output_slabs

SMALL = st.integers(1, 4)
windows = st.builds(Window, SMALL, SMALL, SMALL, st.integers(0, 9), st.integers(0, 9))


def covered(window: Window, out: int) -> set[int]:
    """The indices that one window reads, those of padding among them."""
    first = out * window.stride - window.low
    return {first + tap * window.dilation for tap in range(window.kernel)}


@given(windows, st.integers(1, 30), st.integers(1, 12))
def test_slabs_of_outputs(window: Window, extent: int, most: int) -> None:
    outs = window.out_extent(extent)
    slabs = output_slabs(window, extent, most)
    assert [o for slab in slabs for o in range(*slab.out)] == [*range(outs)]
    for slab in slabs:
        assert 0 < slab.out.extent <= most
        read = set[int]().union(*(covered(window, out) for out in range(*slab.out)))
        assert slab.source == Span(0, extent).intersect(slab.source)
        assert slab.low + slab.source.extent + slab.high == max(read) - min(read) + 1
        assert {i for i in read if 0 <= i < extent} <= {*range(*slab.source)}
        if slab.source.extent:
            assert slab.source.start - slab.low == min(read)


@given(windows, st.integers(1, 30), st.integers(1, 12))
def test_whole_windows_are_read_where_the_input_lies(window: Window, extent: int, most: int) -> None:
    """Only windows that reach into padding are in a slab that is padded."""
    for slab in output_slabs(window, extent, most):
        if slab.low or slab.high:
            for out in range(*slab.out):
                first = out * window.stride - window.low
                assert first < 0 or first + window.reach > extent


@given(windows, st.integers(1, 30), st.integers(1, 12))
def test_slabs_of_inputs(window: Window, extent: int, most: int) -> None:
    outs = window.out_extent(extent)
    assume(outs)
    slabs = input_slabs(window, extent, most)
    assert [i for slab in slabs for i in range(*slab.near)] == [*range(extent)]
    for slab in slabs:
        assert 0 < slab.near.extent <= most
        reaching = {o for o in range(outs) if covered(window, o) & {*range(*slab.near)}}
        assert reaching <= {*range(*slab.outs)}
        assert slab.covered.intersect(slab.near) == slab.covered
        if slab.outs.extent:
            read = set[int]().union(*(covered(window, out) for out in range(*slab.outs)))
            assert slab.frame == Span(min(read), max(read) + 1)
        assert all(i in range(*slab.covered) for o in reaching for i in covered(window, o) & {*range(*slab.near)})
