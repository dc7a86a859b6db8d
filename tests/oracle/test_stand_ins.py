"""Stand-in ranks: a few ranks are lowered and stand for all others, border ranks for border ranks."""

from convmesh.layout import Mesh
from convmesh.oracle.simulate.stand_ins import Crowd
from convmesh.planner.predicting import representatives


def test_an_inner_rank_stands_for_inner_ranks_and_a_border_rank_for_border_ranks() -> None:
    mesh = Mesh(data=16, height=8)
    crowd = Crowd(mesh, representatives(mesh, borders=True))
    inside, first, last = crowd.ranks
    assert [mesh.coordinates(rank)["height"] for rank in crowd.ranks] == [1, 0, 7]
    assert {crowd.stand_in(mesh.rank({"data": d, "height": h})) for d in (0, 5, 15) for h in range(1, 7)} == {inside}
    assert crowd.stand_in(mesh.rank({"data": 9, "height": 0})) == first
    assert crowd.stand_in(mesh.rank({"data": 9, "height": 7})) == last


def test_groups_consist_of_the_stand_ins_of_their_members() -> None:
    mesh = Mesh(data=16, height=8)
    crowd = Crowd(mesh, representatives(mesh, borders=True))
    assert all(crowd.group(rank, ("height",)) == tuple(sorted(crowd.ranks)) for rank in crowd.ranks)
    assert all(crowd.group(rank, ("data",)) == (rank,) for rank in crowd.ranks)


def test_stages_never_stand_in_for_another_lowered_stage() -> None:
    mesh = Mesh(pipe=3, data=4, width=3)
    crowd = Crowd(mesh, representatives(mesh, borders=True))
    for rank in range(mesh.size):
        assert mesh.coordinates(crowd.stand_in(rank))["pipe"] == mesh.coordinates(rank)["pipe"]
