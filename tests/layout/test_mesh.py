"""Ranks and their coordinates."""

import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convmesh.errors import MeshError
from convmesh.layout import AXES, Layout, Mesh
from convmesh.testing.strategies import meshes

some_axes = st.lists(st.sampled_from(AXES), unique=True)


@given(meshes())
def test_every_rank_has_its_own_place(mesh: Mesh) -> None:
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert [mesh.rank(place) for place in places] == list(range(mesh.size))
    assert len({tuple(place.items()) for place in places}) == mesh.size


@given(meshes(), some_axes)
def test_parts_along_several_axes_and_back(mesh: Mesh, axes: list[str]) -> None:
    parts = [mesh.part(axes, mesh.coordinates(rank)) for rank in range(mesh.size)]
    assert set(parts) == set(range(mesh.extent(axes)))
    for rank, part in enumerate(parts):
        place = mesh.coordinates(rank)
        assert mesh.places(axes, part) == {name: place[name] for name in mesh.axes if name in axes}


@settings(max_examples=30)
@given(meshes(), some_axes)
def test_groups_divide_the_ranks(mesh: Mesh, axes: list[str]) -> None:
    groups = [mesh.group(axes, rank) for rank in range(mesh.size)]
    for rank, group in enumerate(groups):
        assert group == sorted(group)
        assert rank in group
        assert len(group) == mesh.extent(axes)
        assert all(groups[other] == group for other in group)


def test_groups_take_any_iterable_of_axes() -> None:
    mesh = Mesh(data=2, height=2, width=2)
    assert mesh.group(iter(("data", "width")), 0) == mesh.group(("width", "data"), 0) == [0, 1, 4, 5]


def test_heavy_traffic_axes_vary_fastest_in_any_order_given() -> None:
    mesh = Mesh(width=2, data=3)
    assert repr(mesh) == "Mesh(data=3, width=2)"
    assert mesh.coordinates(1) == {"data": 0, "width": 1}


def test_axes_of_size_one_do_not_count() -> None:
    assert Mesh(data=2, depth=1) == Mesh(data=2)
    assert hash(Mesh(data=2, depth=1)) == hash(Mesh(data=2))
    assert Mesh(data=2) != Mesh(depth=2)
    assert Mesh().size == 1


def test_a_pickled_mesh_and_layout_equal_those_of_a_process_that_hashes_names_differently() -> None:
    layout = Layout.of(Mesh(data=2, depth=3), (4, 1, 7), {0: "data", 2: "depth"})
    code = (
        "import pickle, sys; from convmesh.layout import Layout, Mesh; sent = pickle.load(sys.stdin.buffer);"
        "mine = Layout.of(Mesh(data=2, depth=3), (4, 1, 7), {0: 'data', 2: 'depth'});"
        "assert sent == mine and sent in {mine} and sent.mesh in {mine.mesh}"
    )
    command = [sys.executable, "-c", code]
    subprocess.run(command, input=pickle.dumps(layout), check=True, env={**os.environ, "PYTHONHASHSEED": "4242"})


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2"])
def test_a_size_that_is_not_a_number_of_ranks(size: int) -> None:
    with pytest.raises(MeshError) as raised:
        Mesh(depth=size)
    assert str(raised.value) == f"`depth` (={size!r}) must be a positive whole number of ranks; leave it out for 1."


def test_an_unknown_axis() -> None:
    message = "`hieght` is not a mesh axis; the axes are pipe, data, depth, height, width, channel, filter."
    for wrong in (lambda: Mesh(hieght=2), lambda: Mesh(height=2).extent(["hieght"])):
        with pytest.raises(MeshError) as raised:
            wrong()
        assert str(raised.value) == message


def test_shares_are_ratios_and_part_of_a_meshs_identity() -> None:
    mesh = Mesh(data=2, height=3).with_shares(data=(6, 2))
    assert mesh.shares == {"data": (3, 1)}
    assert mesh == Mesh(data=2, height=3).with_shares(data=(3, 1)) != mesh.even
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert mesh.with_shares(data=(5, 5)) == mesh.even == Mesh(data=2, height=3)
    assert mesh.weights(("data", "height")) == (3, 3, 3, 1, 1, 1)
    assert mesh.weights(("height",)) is None
    assert repr(mesh) == "Mesh(data=2, height=3).with_shares(data=(3, 1))"


@settings(max_examples=60)
@given(meshes(), some_axes, st.integers(1, 8))
def test_a_group_is_that_of_its_parts_inside_blocks_and_across_them(mesh: Mesh, axes: list[str], block: int) -> None:
    parts = mesh.runs(axes, block)
    if parts is None:
        return
    inside, across = parts
    for rank in range(mesh.size):
        assert len({other // block for other in mesh.group(inside, rank)}) == 1
        blocks = [other // block for other in mesh.group(across, rank)]
        assert len(set(blocks)) == len(blocks)
        both = sorted(other for there in mesh.group(across, rank) for other in mesh.group(inside, there))
        assert both == mesh.group(axes, rank)


def test_an_axis_has_parts_where_its_ranks_lie_in_runs() -> None:
    mesh = Mesh(data=6)
    assert mesh.runs(("data",), 2) == (("data%2",), ("data/2",))
    assert mesh.group(("data%2",), 3) == [2, 3]
    assert mesh.group(("data/2",), 3) == [1, 3, 5]
    assert (mesh.extent(("data%2",)), mesh.extent(("data/2",))) == (2, 3)
    assert Mesh(data=2, height=2).runs(("data", "height"), 2) == (("height",), ("data",))
    assert Mesh(data=4, height=2).runs(("data", "height"), 4) == (("data%2", "height"), ("data/2",))


@pytest.mark.parametrize("name", ["data%4", "data%0", "data%", "dat%2", "data-2"])
def test_names_of_no_part_are_refused(name: str) -> None:
    with pytest.raises(MeshError, match=f"`{name}`"):
        Mesh(data=6).extent((name,))
