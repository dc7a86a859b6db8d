"""Stages: the slowest is as fast as possible, and cuts are only where all values that cross can travel."""

import itertools
import math
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.errors import PlanError
from convmesh.graph import Graph, capture
from convmesh.plans import Plan
from convmesh.plans.balance import BalanceLimits, Cost, balance
from convmesh.plans.pipeline_rules import in_flight, microbatches_for
from convmesh.plans.plan_file import loads
from convmesh.plans.plan_text import dumps
from convmesh.plans.stage_graph import StageGraph, cut_stages

costs = st.builds(Cost, st.integers(0, 9).map(float), st.integers(0, 5), st.integers(0, 5))


def longest(pieces: list[Cost], begins: tuple[int, ...]) -> float:
    bounds = [0, *begins, len(pieces)]
    return max(math.fsum(p.seconds for p in pieces[a:b]) for a, b in itertools.pairwise(bounds))


def fits(pieces: list[Cost], begins: tuple[int, ...], kept: list[int], limit: int) -> bool:
    bounds = [0, *begins, len(pieces)]
    stages = [pieces[a:b] for a, b in itertools.pairwise(bounds)]
    held = (sum(p.bytes_weights + n * p.bytes_kept for p in stage) for stage, n in zip(stages, kept, strict=True))
    return max(held) <= limit


@settings(max_examples=300)
@given(st.lists(costs, min_size=1, max_size=8), st.data())
def test_the_slowest_stage_is_as_fast_and_the_cuts_as_light_as_of_all_cuts(
    pieces: list[Cost], data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(pieces)))
    limit = data.draw(st.none() | st.integers(0, 60))
    kept = in_flight("1f1b", data.draw(st.integers(1, 4)), stages, stages)
    crossing = data.draw(st.lists(st.integers(0, 5), min_size=len(pieces), max_size=len(pieces)))
    limits = BalanceLimits(tuple(kept), limit)
    every = list(itertools.combinations(range(1, len(pieces)), stages - 1))
    allowed = [c for c in every if limit is None or fits(pieces, c, kept, limit)]
    if not allowed:
        with pytest.raises(PlanError, match="within"):
            balance(pieces, stages, limits, crossing)
        return
    chosen = balance(pieces, stages, limits, crossing)
    best = min((longest(pieces, c), sum(crossing[begin] for begin in c)) for c in allowed)
    assert chosen in allowed
    assert (longest(pieces, chosen), sum(crossing[begin] for begin in chosen)) == best


def test_two_thousand_pieces_in_64_stages_take_a_moment() -> None:
    pieces = [Cost((7 * i) % 11 + 0.5, i % 5, i % 3) for i in range(2000)]
    start = time.process_time()
    chosen = balance(pieces, 64, BalanceLimits((1,) * 64, 10_000), list(range(2000)))
    assert time.process_time() - start < 5
    assert longest(pieces, chosen) < 1.05 * sum(p.seconds for p in pieces) / 64 + 11


class Skips(nn.Module):
    """A skip over everything, a size read early and used late, and an unpacked tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.deep = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Conv2d(6, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[2:]
        y = self.deep(self.down(self.first(x)))
        left, right = y.chunk(2, 1)
        y = F.interpolate(torch.cat([right, left], 1), size=size)
        return self.last(torch.cat([y, x], 1))  # type: ignore[no-any-return]


def graph_of(model: nn.Module, *shape: int) -> Graph:
    return capture(model, shape).graph


def test_values_that_later_stages_need_cross_once_and_sizes_not_at_all() -> None:
    row = StageGraph(graph_of(Skips(), 2, 2, 8, 8))
    bounds = row.bounds(["deep", "last"])
    assert row.crossing(bounds[1]) == ("x", "down")
    assert len(row.crossing(bounds[2])) == 1
    with pytest.raises(PlanError, match="several outputs"):
        row.bounds([next(node.layer for node in reversed(row.calls) if node.op == "getitem")])


def test_indices_cannot_cross() -> None:
    class Unpools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = self.a(x).argmax(1, keepdim=True)
            return self.b(x).gather(1, chosen)  # type: ignore[no-any-return]

    row = StageGraph(graph_of(Unpools(), 2, 2, 4, 4))
    with pytest.raises(PlanError, match=r"no stage can start at 'b': .*int64 values.*nearest layer"):
        row.bounds(["b"])


def shared() -> nn.Sequential:
    conv = nn.Conv2d(2, 2, 3, padding=1)
    return nn.Sequential(conv, nn.ReLU(), conv, nn.ReLU(), nn.Conv2d(2, 2, 1))


def test_the_uses_of_a_weight_stay_together() -> None:
    graph = graph_of(shared(), 2, 2, 4, 4)
    assert cut_stages(graph, {}, 2) == ("4",)
    with pytest.raises(PlanError, match=r"weight '0.weight' serves '0' and '0'"):
        StageGraph(graph).bounds(["1"])
    with pytest.raises(PlanError, match="into 2 at most"):
        cut_stages(graph, {}, 3)


def test_every_stage_learns() -> None:
    small = nn.Sequential(nn.ReLU(), nn.Conv2d(2, 2, 1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.ReLU())
    graph = graph_of(small, 2, 2, 8, 8)
    assert cut_stages(graph, {}, 2) == ("4",)  # at the last place where only what was pooled crosses
    row = StageGraph(graph)
    assert row.bounds(["2"]) == [0, 2, 6]
    for starts in (["1"], ["5"], ["2", "3"]):
        with pytest.raises(PlanError, match=r"no weight that learns.*nearest layer where one can start is '4'"):
            row.bounds(starts)


def planned(**options: object) -> Plan:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    model.append(nn.Conv2d(2, 2, 1))
    return cm.plan(model, (8, 2, 16, 16), Mesh(pipe=2), "pipeline", **options)  # type: ignore[arg-type]


def test_plans_say_and_read_their_stages() -> None:
    plan = planned(microbatches=4, schedule="interleaved")
    assert plan.pipeline is not None
    assert len(plan.pipeline.starts) == 3
    assert loads(dumps(plan)).pipeline == plan.pipeline
    assert any("predicted time" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 3}, "must cut 8 samples into equal parts; use 2"),
        ({"microbatches": 0}, "at least 1"),
        ({"schedule": "fast"}, "must be one of gpipe, 1f1b, interleaved, zero-bubble"),
        ({"bytes_stage": 10}, "within 10 bytes"),
        ({"schedule": "zero-bubble", "checkpoint": ["0"]}, "cannot be combined with `checkpoint`"),
    ],
)
def test_impossible_stages_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(**options)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (["nosuch"], "no such layer"),
        (["2", "4"], "makes 3 stages; schedule '1f1b' on Mesh.pipe=2. needs 2"),
        (["0"], "first stage starts there anyway"),
    ],
)
def test_edited_starts_are_checked(starts: list[str], message: str) -> None:
    plan = planned()
    assert plan.pipeline is not None
    edited = replace(plan, pipeline=replace(plan.pipeline, starts=tuple(starts)))
    with pytest.raises(PlanError, match=message):
        edited.check(plan.source.graph)


def test_microbatches_divide_what_a_rank_has() -> None:
    assert microbatches_for(12, 8, "1f1b", 2) == 6
    assert microbatches_for(7, 4, "gpipe", 2) == 1
    assert microbatches_for(10, 8, "interleaved", 4) == 5


def test_zero_bubble_needs_weights_that_serve_once() -> None:
    with pytest.raises(PlanError, match=r"'0\.weight' is used several times"):
        cm.plan(shared(), (4, 2, 4, 4), Mesh(pipe=2), "pipeline", schedule="zero-bubble")
