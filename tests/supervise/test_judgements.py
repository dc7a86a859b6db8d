"""What a supervisor makes of what it sees: pure values."""

import pytest

from convmesh.supervise.hang import Witness, suspects
from convmesh.supervise.outcome import MADE_ROOM, Ending, Outcome, judged
from convmesh.supervise.patience import Patience
from convmesh.supervise.policy import Policy
from convmesh.supervise.pulse import Sign
from convmesh.supervise.slots import Slots
from convmesh.train.replanning import plans_for
from convmesh.train.run_config import PlanConfig

STACK = 'Thread 1 (most recent call first):\n  File "/x/torch/distributed/a.py", line 3 in wait\n'
BUSY = 'Current thread 1 (most recent call first):\n  File "/x/numpy/io.py", line 9 in read\n  File "/y/convmesh/data/loader.py", line 4 in batch\n'  # noqa: E501
HALO = 'Thread 1 (most recent call first):\n  File "/y/convmesh/dist/lost_ranks.py", line 3 in await_work\n  File "/y/convmesh/dist/launching.py", line 4 in wait\n  File "/y/convmesh/ops/convolution/conv.py", line 7 in conv\n'  # noqa: E501


@pytest.mark.parametrize(
    ("codes", "ending", "status", "ranks"),
    [
        ({0: 0, 1: 0}, Ending.DONE, 0, ()),
        ({0: 1, 1: -9}, Ending.LOST, 137, (1,)),  # rank 0 lost its neighbour
        ({0: 2, 1: 1}, Ending.LOST, 1, (1,)),  # rank 0 was told of rank 1's failure
        ({0: 74, 1: 75}, Ending.LOST, 74, (0,)),  # a full disk
        ({0: 75, 1: 1}, Ending.LOST, 1, (1,)),
        ({0: 75, 1: 75}, Ending.LOST, 75, ()),  # the one at fault is on another host
        ({0: 2, 1: 2}, Ending.REFUSED, 2, ()),
        ({0: 3, 1: 2}, Ending.REFUSED, 3, ()),
        ({0: 143, 1: 143}, Ending.STOPPED, 143, ()),
        ({0: MADE_ROOM, 1: MADE_ROOM}, Ending.MADE_ROOM, 0, ()),
        ({}, Ending.ELSEWHERE, 0, ()),
    ],
)
def test_the_worst_end_of_a_rank_decides(
    codes: dict[int, int], ending: Ending, status: int, ranks: tuple[int, ...]
) -> None:
    found = judged(codes)
    assert (found.ending, found.status, found.ranks) == (ending, status, ranks)


def test_the_rank_that_holds_up_the_others_is_found() -> None:
    waits, stopped = Witness(0, Sign(step=5), False, STACK), Witness(1, Sign(step=5), True, "")
    behind, busy = Witness(1, Sign(step=4), False, STACK), Witness(1, Sign(step=5), False, BUSY)
    mute = Witness(1, Sign(step=5), False, "")
    assert [suspects([waits, each]) for each in (stopped, mute, behind, busy)] == [[stopped], [mute], [behind], [busy]]
    assert suspects([waits, Witness(1, Sign(step=5), False, STACK)]) == []
    assert busy.operation == "batch (convmesh/data/loader.py:4), in read"
    assert Witness(0, Sign(step=5), False, HALO).operation == "conv (convmesh/ops/convolution/conv.py:7), in await_work"


def test_a_disk_that_was_never_written_is_not_tried_again() -> None:
    full = Outcome(Ending.LOST, 74)
    assert "nothing was ever written" in Patience(Policy(2)).lost(full, 0, -1)
    patience = Patience(Policy(2, max_restarts=2))
    assert [bool(patience.lost(full, step, began)) for step, began in ((8, 5), (0, -1), (0, -1))] == [
        False,
        False,
        True,
    ]


def test_a_slot_is_left_out_for_longer_each_time() -> None:
    now = 0.0
    slots = Slots(2, seconds_backoff=10, clock=lambda: now)
    slots.lose(1)
    assert (slots.ready(), slots.seconds_until(1), slots.seconds_until(2)) == ((0,), 0.0, 10.0)
    now = 10.0
    assert slots.ready() == (0, 1)
    slots.lose(1)
    assert slots.seconds_until(2) == 20.0


@pytest.mark.parametrize(
    ("plan", "ranks", "first"),
    [
        ({"strategy": "data+spatial", "mesh": {"data": 2, "height": 2}}, 4, {"data": 2, "height": 2}),
        ({"strategy": "data+spatial", "mesh": {"data": 4, "height": 2}}, 6, {"data": 3, "height": 2}),
        ({"strategy": "filter", "mesh": {"filter": 4}}, 3, {"filter": 3}),
        ({"strategy": "data"}, 3, {}),
    ],
)
def test_a_preset_keeps_its_axes_on_the_nearest_mesh(
    plan: dict[str, object], ranks: int, first: dict[str, int]
) -> None:
    config = PlanConfig.model_validate(plan)
    found = plans_for(config, ranks, wanted=8 if ranks != 4 else 4, spatial_dims=2)
    assert (found[0].strategy, found[0].mesh) == (config.strategy, first)
    assert ranks == 4 or (found[-1].strategy, found[-1].mesh) == ("auto", {})


@pytest.mark.parametrize("plan", [{"strategy": "auto", "mesh": {"data": 4}}, {"strategy": "best.toml"}])
def test_plans_that_fix_more_are_searched_anew(plan: dict[str, object]) -> None:
    (found,) = plans_for(PlanConfig.model_validate(plan), 3, wanted=4, spatial_dims=3)
    assert (found.strategy, found.mesh) == ("auto", {})
    assert plans_for(PlanConfig.model_validate(plan), 3, wanted=None, spatial_dims=3)[0].strategy == plan["strategy"]
