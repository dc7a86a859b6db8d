"""The heaviest turns of a pipeline's rank: no heavier turn is missing."""

from hypothesis import given
from hypothesis import strategies as st

from convmesh.oracle.memory.stage_turns import Footprint, heaviest_turns
from convmesh.plans.pipeline_rules import in_flight, suits
from convmesh.plans.stage_order import Action, Kind, actions_of

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble"]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int, int, int]:
    name, pipe = draw(st.sampled_from(SCHEDULES)), draw(st.integers(2, 4))
    own = draw(st.integers(1, 3)) if name in ("interleaved", "zero-bubble") else 1
    count = draw(st.integers(1, 12).filter(lambda n: suits(name, n, pipe)))
    return name, pipe, pipe * own, count, draw(st.integers(0, pipe - 1))


@given(pipelines(), st.data())
def test_no_turn_holds_more_than_the_heaviest_of_its_kind(
    pipeline: tuple[str, int, int, int, int], data: st.DataObject
) -> None:
    actions = actions_of(*pipeline)
    sizes = st.integers(0, 100)
    stages = {
        stage: Footprint(data.draw(sizes), data.draw(sizes), data.draw(sizes))
        for stage in sorted({action.stage for action in actions})
    }
    most: dict[tuple[Kind, int], int] = {}
    for turn in heaviest_turns(actions, stages):
        for kind in turn.kinds:
            most[kind, turn.stage] = max(most.get((kind, turn.stage), 0), turn.bytes_others)
    expected: dict[tuple[Kind, int], int] = {}
    for index, action in enumerate(actions):
        beside = sum(_held(actions[:index], stage, stages[stage], action) for stage in stages)
        key = action.kind, action.stage
        expected[key] = max(expected.get(key, 0), beside)
    assert most == expected


def _held(before: tuple[Action, ...], stage: int, each: Footprint, now: Action) -> int:
    """What a stage holds of all micro-batches except the one of an action."""
    kinds: dict[int, set[Kind]] = {}
    for action in before:
        if action.stage == stage and (stage, action.microbatch) != (now.stage, now.microbatch):
            kinds.setdefault(action.microbatch, set()).add(action.kind)
    return sum(
        each.sent if done & {"backward", "weight"} else each.waiting if "input" in done else each.kept
        for done in kinds.values()
    )


@given(pipelines())
def test_stages_keep_what_their_turns_say(pipeline: tuple[str, int, int, int, int]) -> None:
    name, pipe, stages, count, _ = pipeline
    found = in_flight(name, count, stages, pipe)
    assert len(found) == stages
    assert all(1 <= flights <= count for flights in found)
    if name == "1f1b" and count >= stages:
        assert found == [min(count, stages - stage) for stage in range(stages)]
    if name == "gpipe":
        assert found == [count] * stages
