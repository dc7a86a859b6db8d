"""Integer arithmetic on ranks, blocks and groups, checked by counting them one by one."""

from collections import defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import convmesh as cm
from convmesh.system import GroupSpan, Placement, RankGroup


@dataclass(frozen=True)
class Case:
    placement: Placement
    mesh: cm.Mesh
    axes: tuple[str, ...]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Nodes, levels inside and outside them, and meshes that need not fit them."""
    devices = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    inside = draw(st.sampled_from([n for n in range(1, devices + 1) if devices % n == 0]))
    rack = devices * draw(st.integers(2, 4))
    extents = (*sorted({inside, devices, rack} - {1}), None)
    axes = draw(st.lists(st.sampled_from(["data", "depth", "height", "filter"]), max_size=3, unique=True))
    mesh = cm.Mesh(**{name: draw(st.integers(1, 6)) for name in axes})
    chosen = tuple(name for name in axes if draw(st.booleans()))
    return Case(Placement(extents, devices, draw(st.integers(1, devices))), mesh, chosen)


def device_of(case: Case, rank: int) -> int:
    """The rank's device, by assigning devices one after another."""
    free = (
        device for device in range(10**6) if device % case.placement.devices_per_node < case.placement.ranks_per_node
    )
    return next(device for place, device in enumerate(free) if place == rank)


def brute_spans(case: Case) -> list[GroupSpan]:
    devices = [device_of(case, rank) for rank in range(case.mesh.size)]
    groups = {tuple(case.mesh.group(case.axes, rank)) for rank in range(case.mesh.size)}
    spans, inner = [], 1
    for extent in case.placement.extents:
        outer = extent or 10**9
        blocks, members, sharing = 1, 1, defaultdict(set)
        for group in groups:
            for where in {devices[rank] // outer for rank in group}:
                inner_blocks = [devices[rank] // inner for rank in group if devices[rank] // outer == where]
                blocks = max(blocks, len(set(inner_blocks)))
                members = max(members, *(inner_blocks.count(block) for block in inner_blocks))
                for block in set(inner_blocks) if len(set(inner_blocks)) > 1 else ():
                    sharing[block].add(group)
        spans.append(GroupSpan(blocks, members, max(map(len, sharing.values()), default=0)))
        inner = outer
    return spans


@settings(max_examples=150)
@given(cases())
def test_spans_equal_counting(case: Case) -> None:
    group = RankGroup.of(case.mesh, case.axes)
    assert list(case.placement.spans(group)) == brute_spans(case)
    nodes = [{device_of(case, r) // case.placement.devices_per_node for r in case.mesh.group(case.axes, rank)}
             for rank in range(case.mesh.size)]  # fmt: skip
    assert case.placement.nodes(group) == max(map(len, nodes))


@settings(max_examples=60)
@given(cases())
def test_groups_are_those_of_the_mesh(case: Case) -> None:
    group = RankGroup.of(case.mesh, case.axes)
    for rank in range(case.mesh.size):
        members = case.mesh.group(case.axes, rank)
        assert group.first(rank) == min(members)
        assert group.size == len(members)


@settings(max_examples=60)
@given(cases(), st.data())
def test_levels_join_what_they_say(case: Case, data: st.DataObject) -> None:
    ranks = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=6))
    placement = case.placement
    sizes = [1, *(extent or 10**9 for extent in placement.extents)]
    used = set()
    for a in ranks:
        for b in ranks:
            da, db = device_of(case, a), device_of(case, b)
            joining = next(i for i, size in enumerate(sizes) if da // size == db // size)
            assert placement.level_between(a, b) == (joining - 1 if joining else None)
            used |= {joining - 1} if joining else set()
    assert placement.levels_for(ranks) == tuple(sorted(used))


def test_abci_with_filters_inside_nodes() -> None:
    """Data groups of a data+filter mesh: 4 of them leave every node at once, and share its two ports."""
    abci, mesh = cm.System.load("abci"), cm.Mesh(data=64, filter=4)
    assert abci.spans(mesh, ["filter"]) == {
        "nvlink": GroupSpan(4, 1, 1),
        "rack": GroupSpan(1, 4, 0),
        "spine": GroupSpan(1, 4, 0),
    }
    assert abci.spans(mesh, ["data"]) == {
        "nvlink": GroupSpan(1, 1, 0),
        "rack": GroupSpan(34, 1, 4),
        "spine": GroupSpan(2, 34, 4),
    }
    assert (abci.nodes(mesh, ["filter"]), abci.nodes(mesh, ["data"])) == (1, 64)


def test_a_large_mesh_is_spanned_by_arithmetic() -> None:
    """Counting a million ranks would take too long; blocks that fit are multiplied."""
    dgx, mesh = cm.System.load("dgx-h100"), cm.Mesh(data=2**17, height=4, filter=2)
    assert dgx.spans(mesh, ["data"]) == {"nvswitch": GroupSpan(1, 1, 0), "network": GroupSpan(2**17, 1, 8)}


def test_ranks_sit_on_nodes_in_order() -> None:
    lassen = cm.System.load("lassen")
    names = [level.name if level else None for level in (lassen.level_between(0, r) for r in (0, 1, 2, 4, 71, 72))]
    assert names == [None, "pair", "xbus", "leaf", "leaf", "spine"]
    assert [level.name for level in lassen.levels_for([0, 2, 4])] == ["xbus", "leaf"]
    sparse = lassen.level_between(0, 1, ranks_per_node=1)
    assert sparse is not None
    assert sparse.name == "leaf"


def test_unknown_axes_are_refused() -> None:
    with pytest.raises(cm.MeshError, match="`depht` is not a mesh axis"):
        cm.System.load("abci").spans(cm.Mesh(depth=2), ["depht"])


def test_ranks_without_a_place_are_refused() -> None:
    abci = cm.System.load("abci")
    with pytest.raises(cm.MeshError, match=r"rank -1 has no place on abci, whose links join devices from 0 on\."):
        abci.level_between(-1, 0)
    with pytest.raises(cm.MeshError, match=r"`ranks_per_node` \(=5\) must be from 1 to 4, the devices of a node\."):
        abci.levels_for([0, 1], ranks_per_node=5)
