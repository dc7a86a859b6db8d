"""A few ranks stand for all: those at the border for those at the border."""

from convmesh.layout import Mesh
from convmesh.oracle.simulate.stand_ins import Crowd
from convmesh.planner.predicting import representatives


def test_ranks_inside_are_stood_for_by_one_inside_and_those_at_a_border_by_one_there() -> None:
    mesh = Mesh(data=16, height=8)
    crowd = Crowd(mesh, representatives(mesh, borders=True))
    inside, first, last = crowd.ranks
    assert [mesh.coordinates(rank)["height"] for rank in crowd.ranks] == [1, 0, 7]
    assert {crowd.stand_in(mesh.rank({"data": d, "height": h})) for d in (0, 5, 15) for h in range(1, 7)} == {inside}
    assert crowd.stand_in(mesh.rank({"data": 9, "height": 0})) == first
    assert crowd.stand_in(mesh.rank({"data": 9, "height": 7})) == last


def test_groups_are_those_who_stand_for_their_members() -> None:
    mesh = Mesh(data=16, height=8)
    crowd = Crowd(mesh, representatives(mesh, borders=True))
    assert all(crowd.group(rank, ("height",)) == tuple(sorted(crowd.ranks)) for rank in crowd.ranks)
    assert all(crowd.group(rank, ("data",)) == (rank,) for rank in crowd.ranks)


def test_stages_are_never_stood_for_by_another_stage_that_was_worked_out() -> None:
    mesh = Mesh(pipe=3, data=4, width=3)
    crowd = Crowd(mesh, representatives(mesh, borders=True))
    for rank in range(mesh.size):
        assert mesh.coordinates(crowd.stand_in(rank))["pipe"] == mesh.coordinates(rank)["pipe"]
