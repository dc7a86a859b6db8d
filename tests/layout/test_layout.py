"""Which rank owns which part of a tensor."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convmesh.errors import LayoutError
from convmesh.layout import Cut, Layout, Mesh, Partition
from convmesh.testing.strategies import layouts, meshes

shapes = st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple)


@st.composite
def any_layout(draw: st.DrawFn) -> Layout:
    return draw(layouts(draw(meshes()), draw(shapes)))


@settings(max_examples=100)
@given(any_layout())
def test_ownership_is_a_disjoint_cover_by_the_ranks_that_are_not_replicas(layout: Layout) -> None:
    owned: Counter[tuple[int, ...]] = Counter()
    for rank in range(layout.mesh.size):
        place = layout.mesh.coordinates(rank)
        if all(place[name] == 0 for name in layout.mesh.axes if name not in layout.axes):
            owned.update(itertools.product(*(range(*span) for span in layout.box(rank).spans)))
    assert owned == Counter(itertools.product(*(range(n) for n in layout.shape)))


@settings(max_examples=50)
@given(any_layout())
def test_ranks_along_an_axis_that_cuts_nothing_hold_the_same(layout: Layout) -> None:
    free = [name for name in layout.mesh.axes if name not in layout.axes]
    for rank in range(layout.mesh.size):
        assert {layout.box(replica) for replica in layout.mesh.group(free, rank)} == {layout.box(rank)}


@settings(max_examples=50)
@given(any_layout(), st.data())
def test_another_shape_keeps_axes_and_even_cuts(layout: Layout, data: st.DataObject) -> None:
    shape = data.draw(st.tuples(*[st.integers(0, 9)] * len(layout.shape)))
    other = layout.with_shape(shape)
    assert other.shape == shape
    assert [cut.axes for cut in other.cuts] == [cut.axes for cut in layout.cuts]


def test_the_first_axis_of_a_dim_varies_slowest() -> None:
    mesh = Mesh(data=2, width=2)
    boxes = [Layout.of(mesh, (8,), {0: ("width", "data")}).box(rank).spans[0] for rank in range(4)]
    assert boxes == [(0, 2), (4, 6), (2, 4), (6, 8)]


def test_axes_that_cut_dims() -> None:
    layout = Layout.of(Mesh(data=2, height=2, width=2), (2, 3, 8, 8), {-1: "width", 0: "data", 2: "height"})
    assert layout.axes == ("data", "height", "width")
    assert layout.axes_of([3, 2]) == ("height", "width")
    assert [layout.is_cut(dim) for dim in range(4)] == [True, False, True, True]
    assert layout.with_whole([2, 3]).axes == ("data",)
    assert repr(layout) == "Layout(Mesh(data=2, height=2, width=2), (2, 3, 8, 8), {0: data, 2: height, 3: width})"


def test_axes_of_size_one_may_be_named_and_cut_nothing() -> None:
    assert Layout.of(Mesh(data=2), (4, 4), {0: "data", 1: "depth"}) == Layout.of(Mesh(data=2), (4, 4), {0: "data"})


def test_layouts_are_values() -> None:
    mesh = Mesh(depth=2)
    even, uneven = (Layout(mesh, [Cut(("depth",), Partition(b))]) for b in ((0, 2, 4), (0, 1, 4)))
    assert even == Layout.of(Mesh(depth=2), (4,), {0: "depth"})
    assert even != uneven
    assert len({even, uneven, Layout.of(mesh, (4,), {0: "depth"})}) == 2
    assert even.replacing({0: uneven.cuts[0]}) == uneven


BAD_CUTS = {
    "unknown axis": ({2: "hieght"}, "`cut` names axis 'hieght', which is not a mesh axis; the axes are pipe, data, "
                     "depth, height, width, channel, filter."),
    "axis twice": ({2: "depth", 3: "depth"}, "`cut` names axis 'depth' twice; one axis cuts one dim of a tensor."),
    "axis twice on one dim": ({2: ("depth", "depth")}, "`cut` names axis 'depth' twice; one axis cuts one dim of a "
                              "tensor."),
    "axis of size 1 twice": ({2: "width", 3: "width"}, "`cut` names axis 'width' twice; one axis cuts one dim of a "
                             "tensor."),
    "dim beyond the tensor": ({4: "depth"}, "`cut` names dim 4, but the tensor has 4 dims: (2, 3, 8, 8)."),
    "dim twice": ({3: "depth", -1: "data"}, "`cut` (={3: 'depth', -1: 'data'}) names dim -1 twice; give all its axes "
                  "at once."),
}  # fmt: skip


@pytest.mark.parametrize(("cut", "message"), BAD_CUTS.values(), ids=BAD_CUTS.keys())
def test_bad_cuts(cut: dict[int, str], message: str) -> None:
    with pytest.raises(LayoutError) as raised:
        Layout.of(Mesh(data=2, depth=2), (2, 3, 8, 8), cut)
    assert str(raised.value) == message


def test_an_axis_that_the_mesh_lacks() -> None:
    with pytest.raises(LayoutError) as raised:
        Layout(Mesh(data=2), [Cut(("depth",), Partition.even(4, 1))])
    assert str(raised.value) == "dim 0 is cut by axis 'depth', but Mesh(data=2) has only data."


def test_as_many_parts_as_ranks() -> None:
    with pytest.raises(LayoutError) as raised:
        Layout(Mesh(data=2), [Cut(("data",), Partition.even(4, 3))])
    assert str(raised.value) == (
        "dim 0 has 3 parts, but its axes ('data',) of Mesh(data=2) have 2 ranks; give it that many parts."
    )


def test_a_negative_extent() -> None:
    with pytest.raises(LayoutError, match=r"`extent` \(=-4\) must not be negative"):
        Layout.of(Mesh(data=2), (-4,), {0: "data"})


def test_shares_cut_every_extent_alike() -> None:
    """Down and up again: a deep layer in which a rank has nothing does not change the shares of the layers after it."""
    mesh = Mesh(height=3).with_shares(height=(6, 1, 5))
    wide = Layout.of(mesh, (2, 48), {1: "height"})
    assert wide.cuts[1].partition.bounds == (0, 24, 28, 48)
    deep = wide.with_shape((2, 3))
    assert deep.cuts[1].partition.bounds == (0, 2, 2, 3)
    assert deep.with_shape((2, 48)) == wide
