"""Ranks that disagree about who is in a mesh find out at once, on every rank."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from torch import nn

import convmesh as cm
from convmesh import ConvMeshError, DisagreementError, Mesh, MeshError, open_mesh
from convmesh.dist.meeting import meet
from convmesh.plans import strategy_for
from convmesh.testing import opened, run_ranks
from tests.conftest import Pools


def outcome(choices: list[list[int] | None], size: int = 0) -> str:
    """What opening a mesh, of that many ranks, over this rank's own choice of ranks says."""
    ranks = choices[dist.get_rank()]
    if ranks == []:
        return "stays away"
    size = size or (dist.get_world_size() if ranks is None else len(ranks))
    try:
        open_mesh(Mesh(data=size), ranks=ranks)
    except (DisagreementError, MeshError) as error:
        return f"{type(error).__name__}: {error}"
    return "opened"


CASES: dict[str, list[list[int] | None]] = {
    "a rank more": [[0, 1], None, None],
    "a circle of pairs": [[0, 1], [1, 2], [2, 0]],
    "a rank waits for a circle": [[0, 3], [1, 2], [1, 2, 3], [3, 1]],
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_disagree_about_ranks(case: str) -> None:
    choices = CASES[case]
    for found in run_ranks(len(choices), outcome, choices):
        assert found.startswith("DisagreementError: `ranks` must be the same on every rank of a mesh, but rank")
        assert "opens Mesh(data=" in found
        assert found.endswith("Pass the same `mesh` and `ranks` on all.")


def test_the_error_says_who_wants_what() -> None:
    first, *_ = run_ranks(3, outcome, CASES["a rank more"])
    assert "rank 0 opens Mesh(data=2) over ranks 0, 1; rank 1 opens Mesh(data=3) over ranks 0 to 2" in first


def test_a_rank_that_is_refused_does_not_leave_the_others_waiting() -> None:
    first, second = run_ranks(2, outcome, [[0, 1], [1, 1]])
    assert second.startswith("MeshError: `ranks` (=(1, 1)) must be different ranks")
    assert first.startswith("DisagreementError")
    assert "rank 1 was refused: `ranks` (=(1, 1))" in first
    first, second = run_ranks(2, outcome, [[0, 1], [1]], 2)
    assert "rank 1 was refused: `mesh` (=Mesh(data=2)) has 2 ranks, but there are 1 ranks given" in first
    assert second.startswith("MeshError: `mesh` (=Mesh(data=2)) has 2 ranks")


def test_ranks_may_meet_in_any_order() -> None:
    def meet_some() -> None:
        """Rank 1 is in both pairs, and comes to one of them late; nobody is wrong."""
        for pair in {0: [(0, 1)], 1: [(1, 2), (0, 1)], 2: [(1, 2)]}[dist.get_rank()]:
            meet(pair, "a pair", None)
        meet((0, 1, 2), "all", None)

    run_ranks(3, meet_some)


def test_a_rank_that_never_comes_is_named() -> None:
    def waits() -> str:
        if dist.get_rank() == 1:
            return ""
        with pytest.raises(DisagreementError) as caught:
            meet((0, 1), "Mesh(data=2) over ranks 0, 1", timedelta(seconds=0))
        return str(caught.value)

    first, _ = run_ranks(2, waits)
    assert first.startswith("rank 0 opens Mesh(data=2) over ranks 0, 1 and waits: rank 1 has not called `open_mesh`")


def test_ranks_that_disagreed_can_agree_later() -> None:
    def disagree_first() -> str:
        first = outcome([[0, 1], None, None])
        dist.barrier()
        return f"{first[:17]}, {outcome([None] * 3)}, {outcome([[0, 1], [0, 1], []])}"

    assert run_ranks(3, disagree_first) == [
        "DisagreementError, opened, opened",
        "DisagreementError, opened, opened",
        "DisagreementError, opened, stays away",
    ]


def plans_for(meshes: list[Mesh], wrong: list[int], given: bool) -> str:
    """What `parallelize` says where ranks hold plans for different meshes, or for another network."""
    rank = dist.get_rank()
    model, other = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 5)
    plan = cm.plan(other if rank in wrong else model, (4, 3, 8, 8), meshes[rank], strategy_for(meshes[rank]))
    try:
        cm.parallelize(model, plan, mesh=opened(Mesh(data=2)) if given else None)
    except ConvMeshError as error:
        return f"{type(error).__name__}: {error}"
    return "made"


@pytest.mark.parametrize("given", [True, False])
def test_plans_for_different_meshes(pools: Pools, given: bool) -> None:
    for found in pools[2].run(plans_for, [Mesh(data=2), Mesh(height=2)], [], given):
        assert found.startswith("DisagreementError: ")
        assert "mesh" in found
        assert "must be the same on every rank" in found


def test_a_plan_that_is_refused_on_one_rank(pools: Pools) -> None:
    first, second = pools[2].run(plans_for, [Mesh(data=2)] * 2, [1], False)
    assert second.startswith("PlanError: the plan was made for another network")
    assert first.startswith("DisagreementError: ")
    assert "rank 1 was refused: the plan was made for another network" in first
