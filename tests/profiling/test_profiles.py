"""Profiles of real runs: the parts add up, the trace is whole, and a slow rank is named."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import convmesh as cm
from convmesh.cli.main import main
from convmesh.layout import Mesh
from convmesh.plans.plan import Schedule
from convmesh.profiling.findings import findings
from convmesh.profiling.matched_transfers import matched
from convmesh.profiling.profile_folder import load_run
from convmesh.profiling.profile_trace import trace_of
from convmesh.profiling.rank_profile import RankProfile, TransferTimes, file_of
from convmesh.profiling.rank_times import timed_run
from convmesh.profiling.session import ProfileSession
from convmesh.testing import RankPool
from tests.train.runs import images, lines, losses, ran

Pools = dict[int, RankPool]
SPATIAL = {"strategy": "spatial"}


def late_on_rank_1(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that takes rank 1 a fifth of a second of its processor's time."""
    begin = time.thread_time()
    while dist.get_rank() == 1 and time.thread_time() - begin < 0.2:
        pass
    return torch.nn.functional.cross_entropy(output, target)


@pytest.fixture(scope="module")
def profiled(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiled") / "run"
    plan = {**SPATIAL, "predict": True, "system": "perlmutter"}
    pools[2].run(ran, {"profile_steps": 4, "epochs": 2, "plan": plan, "schedule": {"epochs": 3}}, str(folder))
    return folder


def test_profiling_changes_no_loss(profiled: Path, pools: Pools, tmp_path: Path) -> None:
    pools[2].run(ran, {"epochs": 2, "plan": SPATIAL, "schedule": {"epochs": 3}}, str(tmp_path / "run"))
    assert losses(profiled) == losses(tmp_path / "run")


def test_the_parts_of_a_rank_add_up_to_its_steps(profiled: Path) -> None:
    run = load_run(profiled).run
    measured = {line["step"]: line["seconds_step"] for line in lines(profiled)}
    assert [step.steps[0].step for step in run.steps] == [4, 5, 6, 7]  # after three that warm up
    for step in run.steps:
        assert step.times(0).step == pytest.approx(measured[step.steps[0].step], rel=0.02)
        for rank in (0, 1):
            times = step.times(rank)
            parts = times.compute + times.exposed + times.idle + times.data + times.other
            assert parts == pytest.approx(times.step)
            assert min(times.compute, times.exposed + times.hidden) > 0
            assert min(times.idle, times.data, times.other) >= -0.02 * times.step  # nothing counts twice
    # one step of a busy machine may hide nothing; eight of them hide something
    assert sum(step.times(rank).hidden for step in run.steps for rank in (0, 1)) > 0


def test_every_layer_is_timed_in_both_directions_with_its_transfers(profiled: Path) -> None:
    run = load_run(profiled).run
    cells = set(run.layers(0))
    for layer in ("0", "1", "4", "7"):
        assert {(layer, "forward"), (layer, "backward")} <= cells
    assert {("loss", "forward"), ("loss", "backward"), ("", "update")} <= cells
    carried = {(t.layer, t.phase, t.carrier) for t in run.profile().transfers}
    assert {("4", "forward", "neighbour"), ("1", "forward", "all_reduce"), ("", "reduction", "all_reduce")} <= carried


def test_the_trace_nests_in_steps_and_has_the_prediction(profiled: Path) -> None:
    loaded = load_run(profiled)
    events = json.loads(json.dumps(trace_of(loaded.run, loaded.prediction)))["traceEvents"]
    timed = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in timed} == {0, 1, 2}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"][2].startswith("predicted")
    for rank in (0, 1):
        own = [event for event in timed if event["pid"] == rank]
        steps = [(e["ts"], e["ts"] + e["dur"]) for e in own if e["cat"] == "step"]
        assert len(steps) == 4
        for event in own:
            begin, end = event["ts"], event["ts"] + event["dur"]
            assert any(first - 1 <= begin <= end <= last + 1 for first, last in steps)


def test_the_verb_shows_ranks_layers_and_prediction(profiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(profiled)]) == 0
    page = capsys.readouterr().out
    assert all(word in page for word in ("exposed", "hidden", "predicted", "4 forward", "ui.perfetto.dev"))
    assert (profiled / "profile" / "trace.json").exists()
    trace = profiled.parent / "trace.json"
    assert main(["profile", str(profiled), "--json", "--trace", str(trace)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["rank"] for row in told["ranks"]] == [0, 1]
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]


def test_a_run_without_profile_is_told_how_to_get_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "--profile" in told
    assert len(told.splitlines()) == 1
    assert main(["profile", str(tmp_path / "none")]) == 2
    file_of(tmp_path, 0).parent.mkdir()
    file_of(tmp_path, 0).write_text("{}", encoding="utf-8")
    assert main(["profile", str(tmp_path)]) == 2


def test_a_slow_rank_is_named(pools: Pools, tmp_path: Path) -> None:
    loss = f"{__name__}:late_on_rank_1"
    pools[2].run(ran, {"profile_steps": 3, "steps": 4, "loss": loss, "plan": SPATIAL}, str(tmp_path / "run"))
    (slow,) = findings(load_run(tmp_path / "run").run, None)
    assert (slow.what, slow.rank) == ("rank", 1)
    assert slow.seconds > 0.1
    assert "most in loss forward" in str(slow)


class LateData(TensorDataset):
    """Images that come to rank 1 as from a slow disk."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        time.sleep(0.15 if dist.get_rank() == 1 else 0.0)
        return tuple(super().__getitem__(index))


def late_data() -> LateData:
    return LateData(*images(40).tensors)


def test_a_rank_that_waits_for_data_is_named_with_that(pools: Pools, tmp_path: Path) -> None:
    data = {"source": f"{__name__}:late_data", "threads": 1}
    tables = {"profile_steps": 3, "steps": 7, "data": data, "plan": {"strategy": "data"}}
    pools[2].run(ran, tables, str(tmp_path / "run"))
    (slow,) = findings(load_run(tmp_path / "run").run, None)
    assert (slow.what, slow.rank) == ("rank", 1)
    assert "most in waiting for data" in str(slow)


@pytest.mark.parametrize("changes", [{"accumulate": 2}, {"plan": {"strategy": "data", "reduction": "sharded"}}])
def test_other_ways_to_make_a_step_are_profiled_too(changes: dict[str, Any], pools: Pools, tmp_path: Path) -> None:
    pools[2].run(ran, {"profile_steps": 2, "steps": 3, **changes}, str(tmp_path / "run"))
    run = load_run(tmp_path / "run").run
    assert [step.steps[0].step for step in run.steps] == [2, 3]  # a short run gives up its warm-up
    assert min(run.times(1).compute, run.times(1).exposed) > 0


def test_a_compiled_step_is_profiled_by_what_runs_between_transfers(pools: Pools, tmp_path: Path) -> None:
    tables = {"steps": 4, "compile": "eager", "plan": SPATIAL}
    pools[2].run(ran, {**tables, "profile_steps": 2}, str(tmp_path / "run"))
    pools[2].run(ran, tables, str(tmp_path / "plain"))
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    run = load_run(tmp_path / "run").run
    cells = set(run.layers(0))
    assert {("0", "forward"), ("4", "backward"), ("", "update")} <= cells  # halos stand between their layers' parts
    assert any({"4", "5", "6"} <= {*layers.split("+")} for layers, phase in cells if phase == "forward")
    named = {layer for layers, _ in cells for layer in layers.split("+")}
    assert {"0", "1", "4", "7", "loss"} <= named
    carried = {(t.layer, t.phase, t.carrier) for t in run.profile().transfers}
    assert {("4", "forward", "neighbour"), ("1", "forward", "all_reduce"), ("", "reduction", "all_reduce")} <= carried
    for rank in (0, 1):
        times = run.times(rank)
        assert min(times.compute, times.exposed + times.idle) > 0


@pytest.mark.parametrize(
    ("schedule", "compiling"),
    [("1f1b", False), ("interleaved", False), ("zero-bubble", False), ("interleaved", "eager")],
)
def test_a_pipeline_is_profiled_by_layer_and_message(schedule: Schedule, compiling: bool | str, pools: Pools) -> None:
    profiles = pools[2].run(piped, schedule, compiling)
    run = timed_run(profiles)
    assert run.by_layer == (not compiling)
    layers = {layer for rank in (0, 1) for joined, _ in run.layers(rank) for layer in joined.split("+")}
    assert {"0", "2", "4", "6", "loss"} <= layers
    for rank in (0, 1):
        assert {phase for layer, phase in run.layers(rank) if layer} == {"forward", "backward"}
    names = [[c.message for c in step.steps[rank].crossings if c.message] for step in run.steps for rank in (0, 1)]
    assert {*names[0]} == {*names[1]}  # what one rank sends the other receives
    assert len(names[0]) == len({*names[0]})
    waited = [m.crossing for step in run.steps for own in step.matches.values() for m in own if m.crossing.message]
    assert all(each.layer for each in waited)
    assert sum(each.bytes_sent for each in waited) > 0


def piped(schedule: Schedule, compiling: bool | str) -> RankProfile:
    """Two profiled steps of four stages, or of two."""
    torch.manual_seed(0)
    convs = [nn.Conv2d(2, 2, 3, padding=1) for _ in range(4)]
    model = nn.Sequential(*(layer for conv in convs for layer in (conv, nn.ReLU())))
    x = torch.randn(8, 2, 8, 8)
    plan = cm.plan(model, x, Mesh(pipe=2), "pipeline", microbatches=4, schedule=schedule)
    net = cm.parallelize(model, plan, loss=nn.functional.mse_loss, compile=compiling)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    session = ProfileSession(net, opt)
    session.attach()
    for step in range(2):
        begin = time.perf_counter()
        net(net.shard_input(x), net.shard_target(torch.zeros_like(x))).backward()
        opt.step()
        session.end_step(step, begin, time.perf_counter(), 0.0)
    session.detach()
    return session.profile


def test_who_posts_last_is_to_blame_for_what_others_wait() -> None:
    early = TransferTimes("a", "forward", "all_reduce", ("data",), 8, posted=1.0, needed=2.0, arrived=6.0)
    late = TransferTimes("a", "forward", "all_reduce", ("data",), 8, posted=5.0, needed=5.0, arrived=6.0)
    (waited,), (last,) = matched({0: (early,), 1: (late,)}, Mesh(data=2)).values()
    assert (waited.idle, waited.exposed, waited.hidden, waited.last) == (3.0, 1.0, 0.0, 1)
    assert (last.idle, last.exposed) == (0.0, 1.0)


def test_a_transfer_behind_work_is_hidden() -> None:
    one = TransferTimes("", "reduction", "all_reduce", ("data",), 8, posted=1.0, needed=4.0, arrived=4.0, done=3.0)
    (match,) = matched({0: (one,)}, Mesh(data=2))[0]
    assert (match.hidden, match.exposed, match.idle) == (2.0, 0.0, 0.0)
