"""Predictions of real plans: their parts add up, and they state their basis."""

import json
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.oracle import Assumptions, predict_programs
from convmesh.planner.predicting import programs_of, representatives
from convmesh.plans import Plan, Transfer, Wait, Work
from convmesh.system import System

SYSTEM = System.load("dgx-a100")
SHAPE = (32, 3, 64, 64)


def network() -> nn.Module:
    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]

    with torch.device("meta"):
        return nn.Sequential(
            *block(3, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 64), *block(64, 64),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip


CASES: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
    "alone": ({}, "data", {}),
    "data": ({"data": 8}, "data", {}),
    "sharded": ({"data": 8}, "data", {"reduction": "sharded"}),
    "broadcast": ({"data": 8}, "data", {"reduction": "broadcast"}),
    "spatial": ({"height": 4, "width": 2}, "spatial", {}),
    "filter": ({"filter": 4}, "filter", {}),
    "channel": ({"channel": 4}, "channel", {}),
    "mixed": ({"data": 2, "height": 2}, "data+spatial", {}),
    "gpipe": ({"pipe": 2}, "pipeline", {"schedule": "gpipe"}),
    "zero-bubble": ({"pipe": 2}, "pipeline", {"schedule": "zero-bubble"}),
    "interleaved": ({"pipe": 2, "data": 2}, "data+pipeline", {"schedule": "interleaved"}),
}


def made(name: str) -> Plan:
    axes, strategy, options = CASES[name]
    return cm.plan(network(), SHAPE, Mesh(**axes), strategy, **options)


@pytest.mark.parametrize("name", CASES)
def test_parts_add_up_and_lie_in_their_bounds(name: str) -> None:
    plan = made(name)
    found = cm.predict(plan, SYSTEM)
    parts = found.parts
    together = parts.compute.value + parts.exposed.value + parts.idle.value + parts.update.value
    assert found.seconds_step == pytest.approx(together)
    end = max(i.end for i in found.timeline.intervals)
    assert found.seconds_step >= end * (1 - 1e-9), "the rest is waiting for the slowest rank of all"
    assert found.seconds.low <= found.seconds.value <= found.seconds.high
    assert min(parts.compute.value, parts.update.value) > 0
    assert min(parts.exposed.value, parts.hidden.value, parts.idle.value) >= -1e-9
    json.dumps(found.to_plain())
    page = str(found)
    assert all(word in page for word in ("step", "computation", "memory", "sent", "energy", "slowest layers"))


def test_one_rank_sends_nothing_and_waits_for_nobody() -> None:
    found = cm.predict(made("alone"), SYSTEM)
    assert found.bytes_sent == 0
    assert found.parts.exposed.value == found.parts.hidden.value == 0
    assert found.parts.idle.value < 1e-12


def test_bytes_sent_include_transfers_after_the_optimiser() -> None:
    bucketed, sharded = (cm.predict(made(name), SYSTEM) for name in ("data", "sharded"))
    assert sharded.bytes_sent == pytest.approx(bucketed.bytes_sent, rel=0.02)
    assert sharded.parts.update.value < bucketed.parts.update.value


def test_a_step_takes_as_long_as_its_input_and_longer_among_many() -> None:
    plan = made("data")
    programs = programs_of(plan, representatives(plan.mesh))
    quiet = predict_programs(programs, SYSTEM, Assumptions(jitter=0.0))
    shaky = predict_programs(programs, SYSTEM, Assumptions(jitter=0.05))
    starved = predict_programs(programs, SYSTEM, Assumptions(seconds_input=1.0))
    assert quiet.parts.idle.value < 1e-12
    assert shaky.seconds_step > quiet.seconds_step
    assert starved.seconds_step == pytest.approx(1.0)


def test_bad_assumptions_are_refused() -> None:
    with pytest.raises(cm.PlanError, match="jitter"):
        Assumptions(jitter=-0.1)
    with pytest.raises(cm.PlanError, match="seconds_input"):
        Assumptions(seconds_input=float("nan"))


def test_ranks_at_borders_stand_for_others_too() -> None:
    mesh = Mesh(data=8, height=4, width=3)
    places = [mesh.coordinates(rank) for rank in representatives(mesh, borders=True)]
    assert [(p["data"], p["height"], p["width"]) for p in places] == [(0, 1, 1), (0, 0, 0), (0, 3, 2)]
    assert representatives(Mesh(pipe=3, data=2)) == [0, 2, 4]


def test_stages_predicted_together_equal_those_predicted_apart() -> None:
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4)))
    plan = cm.plan(model, (4, 4, 32, 32), Mesh(pipe=2, height=2), {"*": {"height": "height"}}, microbatches=2)
    for rank, program in programs_of(plan, range(4)).items():
        assert program == cm.lower_plan(plan, rank).program


def test_halos_are_waited_for_after_a_convolutions_own_part() -> None:
    plan = cm.plan(nn.Conv2d(4, 8, 3, padding=1), (2, 4, 16, 16), Mesh(height=2), "spatial")
    steps = cm.lower_plan(plan, 0).program.nodes[1].forward
    kinds = [type(step) for step in steps]
    assert kinds[:4] == [Work, Transfer, Work, Wait]  # packed, sent, own part, the neighbour's
    (wait,) = (step for step in steps if isinstance(step, Wait))
    assert wait == Wait((0,), ((1, 2 * 4 * 16 * 4),))


@pytest.mark.parametrize("reduction", ["bucketed", "sharded", "broadcast"])
def test_every_summed_weight_is_in_one_bucket_and_updated_as_a_whole(reduction: str) -> None:
    mesh = Mesh(data=4)
    plan = cm.plan(network(), SHAPE, mesh, "data", reduction=reduction)  # type: ignore[arg-type]
    programs = programs_of(plan, range(4))
    learning = {w.name for w in programs[0].weights if w.learns}
    for program in programs.values():
        names = [name for bucket in program.buckets for name in bucket.weights]
        assert sorted(names) == sorted(learning)
    updated = [sum(w.elements for w in program.weights) for program in programs.values()]
    whole = sum(p.numel() for p in network().parameters())
    assert sum(updated) == whole * (4 if reduction == "bucketed" else 1)


def test_65536_ranks_take_a_moment_once_lowered() -> None:
    plan = cm.plan(network(), (65_536, 3, 64, 64), Mesh(data=4096, height=4, width=4), "data+spatial")
    programs = programs_of(plan, representatives(plan.mesh, borders=True))
    began = time.process_time()
    predict_programs(programs, SYSTEM)
    assert time.process_time() - began < 2.0  # far less where no other process uses the core


@pytest.mark.parametrize("name", ["data", "spatial", "filter", "gpipe", "interleaved"])
def test_a_loss_counts_on_ranks_that_have_the_networks_end(name: str) -> None:
    plan = made(name)
    target = torch.empty(SHAPE[0], dtype=torch.int64, device="meta")
    without, with_it = cm.predict(plan, SYSTEM), cm.predict(plan, SYSTEM, loss=F.cross_entropy, target=target)
    assert with_it.seconds_step > without.seconds_step
    layers = {i.layer for i in with_it.timeline.intervals}
    assert layers - {i.layer for i in without.timeline.intervals} == {"loss"}
    losing = {i.rank for i in with_it.timeline.intervals if i.layer == "loss"}
    assert all(plan.mesh.coordinates(rank).get("pipe", 1) == 1 for rank in losing)
    with pytest.raises(cm.PlanError, match="go together"):
        cm.predict(plan, SYSTEM, loss=F.cross_entropy)
