"""Runs on real ranks: the same losses on every mesh, after every resume, and with every way to make a step."""

import json
import os
import subprocess
import tomllib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convmesh import CheckpointWarning, RunError
from convmesh.testing import RankPool
from convmesh.train.circumstances import git_state
from convmesh.train.config_files import load_config
from tests.train.runs import HERE, config, lines, losses, ran

Pools = dict[int, RankPool]
FILES = {"config.toml", "plan.toml", "prediction.json", "environment.json", "metrics.jsonl", "log.txt", "summary.json"}


@pytest.fixture(scope="module")
def whole(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one process, without a break."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    pools[1].run(ran, {}, str(folder))
    return folder


def test_the_run_folder_has_all_that_other_tools_read(whole: Path) -> None:
    assert {path.name for path in whole.iterdir()} >= FILES | {"checkpoints"}
    summary = json.loads((whole / "summary.json").read_text(encoding="utf-8"))
    assert (summary["steps"], summary["ranks"], summary["mesh"], summary["restarts"]) == (15, 1, {}, 0)
    assert {"final_loss", "seconds_total", "predicted_seconds_step", "measured_seconds_step"} <= {*summary}
    assert summary["final_loss"] == losses(whole)[-1]
    assert [line["step"] for line in lines(whole)] == [*range(1, 16)]
    assert {"epoch", "seconds_step", "seconds_data", "samples_per_second", "lr"} <= {*lines(whole)[0]}
    assert [line["step"] for line in lines(whole) if "eval" in line] == [5, 10, 15]
    assert lines(whole)[-1]["eval"] == summary["eval"]
    assert {"accuracy", "loss"} == {*summary["eval"]}
    assert sorted(path.name for path in (whole / "checkpoints").iterdir() if path.name.isdigit()) == ["10", "15"]
    environment = json.loads((whole / "environment.json").read_text(encoding="utf-8"))
    assert environment["versions"]["torch"] == torch.__version__
    assert "cpu_capability" in environment["kernels"]
    assert environment["git"] == git_state()


def test_a_repository_is_known_by_its_commit_and_whether_files_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert git_state() is None
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@b.c"]
    (tmp_path / "run.toml").write_text("batch = 1\n", encoding="utf-8")
    for args in (["init", "-q", "-b", "trunk"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *args], check=True)
    found = git_state()
    assert found is not None
    assert (len(found["commit"]), found["branch"], found["changed"]) == (40, "trunk", False)
    (tmp_path / "run.toml").write_text("batch = 2\n", encoding="utf-8")
    assert git_state() == {**found, "changed": True}


def test_a_run_tells_what_its_rank_read(pools: Pools, tmp_path: Path) -> None:
    images = torch.randn(8, 1, 8, 8).numpy()
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "images.targets.npy", np.arange(8) % 2)
    data = {"source": str(tmp_path / "images.npy"), "test_source": "", "test_args": {}, "augment": {"flip": ""}}
    tables = {"data": data, "epochs": 2, "plan": {"strategy": "spatial", "mesh": {"height": 2}}}
    summary = pools[2].run(ran, tables, str(tmp_path / "run"))[0]
    assert summary["bytes_read"] == summary["bytes_needed"]
    assert 0 <= summary["bytes_read"] - 2 * images.nbytes // 2 <= 2 * 8 * 8  # half of each image, twice, and classes


def test_ranks_that_all_do_the_same_are_told_of(pools: Pools, tmp_path: Path) -> None:
    """Two images of four rows and three channels: two ranks get two rows each, and four would get too little."""
    data = {"source": f"{HERE}:maps", "test_source": "", "test_args": {}, "augment": {"crop": [4, 4]}}
    for ranks in (2, 4):
        plan = {"strategy": "spatial", "mesh": {"height": ranks}}
        layer = {"in_channels": 1, "out_channels": 3, "kernel_size": 3, "padding": 1}
        tables = {
            "batch": 2,
            "steps": 1,
            "plan": plan,
            "model": {"name": "torch.nn:Conv2d", "args": layer},
            "data": data,
        }
        pools[ranks].run(ran, tables, str(tmp_path / str(ranks)))
        told = "ranks along height do the same work: the plan cuts no layer there."
        assert (told in (tmp_path / str(ranks) / "log.txt").read_text(encoding="utf-8")) == (ranks == 4)


def test_samples_of_any_type_are_trained_on_in_the_precision_of_the_run(pools: Pools, tmp_path: Path) -> None:
    """Volumes are often kept as float64 or float16; networks are float32 unless the run file says otherwise."""
    last = []
    for kind in ("f8", "f4", "f2"):
        np.save(tmp_path / "images.npy", np.random.default_rng(0).integers(-3, 3, (8, 1, 8, 8)).astype(kind))
        np.save(tmp_path / "images.targets.npy", np.arange(8) % 2)
        data = {"source": str(tmp_path / "images.npy"), "test_source": "", "test_args": {}, "augment": {"flip": ""}}
        tables = {"data": data, "epochs": 1, "precision": "fp32"}
        last.append(pools[1].run(ran, tables, str(tmp_path / kind))[0]["final_loss"])
    assert last[0] == last[1] == last[2]


def test_ranks_that_outnumber_the_cores_are_not_predicted(pools: Pools, tmp_path: Path) -> None:
    ranks, cores = 4, len(os.sched_getaffinity(0))
    pools[ranks].run(ran, {"steps": 1, "plan": {"predict": True, "system": "auto"}}, str(tmp_path / "run"))
    told = json.loads((tmp_path / "run" / "prediction.json").read_text(encoding="utf-8"))
    assert (told["seconds_step"] is None) == (ranks > cores and not torch.cuda.is_available())
    if told["seconds_step"] is None:
        assert told["reason"] == f"4 ranks take turns on {cores} cores, in an order that nobody knows beforehand"
        assert told["reason"] in (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")


def test_the_resolved_config_is_the_run_again(whole: Path) -> None:
    assert load_config(whole / "config.toml") == config()
    assert "mesh" in tomllib.loads((whole / "plan.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("ranks", "plan", "changes"),
    [
        (2, {"strategy": "data"}, {"data": {"store_gib": 0.01}}),
        (2, {"strategy": "spatial"}, {"accumulate": 1}),
        (2, {"strategy": "filter", "mesh": {"filter": 2}}, {}),
        (4, {"strategy": "data+spatial"}, {}),
        (2, {"strategy": "data", "reduction": "sharded"}, {}),
        (2, {"strategy": "data", "recompute": ["0"]}, {}),
    ],
    ids=["data", "spatial", "filter", "data+spatial", "sharded", "recompute"],
)
def test_every_mesh_has_the_same_losses(
    ranks: int, plan: dict[str, Any], changes: dict[str, Any], whole: Path, pools: Pools, tmp_path: Path
) -> None:
    summaries = pools[ranks].run(ran, {"plan": plan, **changes}, str(tmp_path / "run"))
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=1e-9)
    for summary in summaries:
        assert summary["eval"] == pytest.approx(lines(whole)[-1]["eval"], rel=1e-9)


def test_two_resumes_in_one_epoch_on_other_meshes_change_nothing(whole: Path, pools: Pools, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    pools[2].run(ran, {"steps": 6, "plan": {"strategy": "spatial"}}, run, True)  # nothing to resume: it starts
    pools[1].run(ran, {"steps": 8}, run, True)
    summaries = pools[4].run(ran, {"plan": {"strategy": "data+spatial"}}, run, True)
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=1e-9)
    assert {(summary["steps"], summary["restarts"]) for summary in summaries} == {(15, 2)}
    assert [line["lr"] for line in lines(tmp_path / "run")] == [line["lr"] for line in lines(whole)]
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert log.count("goes on with other settings") == 2
    assert "other settings: steps 6 -> 8, plan.strategy spatial -> data\n" in log


def ran_again(tables: dict[str, Any], folder: str) -> tuple[dict[str, Any], list[str]]:
    """On a rank: the summary of a resumed run, and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        summary = ran(tables, folder, True)
    return summary, [str(each.message) for each in caught if each.category is CheckpointWarning]


def test_a_run_goes_back_behind_a_damaged_checkpoint_and_says_so(whole: Path, pools: Pools, tmp_path: Path) -> None:
    """Once on the terminal, in log.txt and in the events of summary.json; only the steps since are done again."""
    pools[2].run(ran, {"steps": 6, "plan": {"reduction": "sharded"}}, str(tmp_path))
    os.truncate(tmp_path / "checkpoints" / "6" / "rank-00001.safetensors", 100)
    (summary, (warned,)), (_, others) = pools[2].run(ran_again, {"plan": {"strategy": "spatial"}}, str(tmp_path))
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-9)
    told = next(event["what"] for event in summary["events"] if event["kind"] == "resumed")
    assert told.startswith("resumes after step 5 on 2 ranks; checkpoint 6 cannot be used: ")
    assert "has 100 bytes instead of" in told
    assert (warned, others) == (f"{told.partition('; ')[2]} The one before is loaded instead.", [])
    assert told in (tmp_path / "log.txt").read_text(encoding="utf-8")


def test_a_complete_run_that_is_resumed_stays_as_it_is(pools: Pools, tmp_path: Path) -> None:
    before = pools[1].run(ran, {"steps": 2}, str(tmp_path))[0]
    after = pools[2].run(ran, {"steps": 2}, str(tmp_path), True)[0]
    same = ["steps", "final_loss", "eval", "ranks", "mesh", "measured_seconds_step", "data_share", "bytes_read"]
    kept = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert [after[name] for name in same] == [kept[name] for name in same] == [before[name] for name in same]
    assert "other settings" not in (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert len(lines(tmp_path)) == 2


def test_an_earlier_run_is_refused_on_every_rank(whole: Path, pools: Pools) -> None:
    for message in pools[2].run(refused, {}, str(whole)):
        assert "holds an earlier run" in message


def refused(tables: dict[str, Any], folder: str) -> str:
    with pytest.raises(RunError) as caught:
        ran(tables, folder)
    return str(caught.value)


def test_parts_of_a_batch_are_one_step(pools: Pools, tmp_path: Path) -> None:
    still = {"steps": 4, "model": {"name": f"{HERE}:smooth"}}  # no batch norm, whose statistics are those of a part
    pools[1].run(ran, still, str(tmp_path / "whole"))
    pools[2].run(ran, {**still, "accumulate": 2}, str(tmp_path / "parts"))
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-9)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_lower_precisions_stay_near(precision: str, whole: Path, pools: Pools, tmp_path: Path) -> None:
    options = {"precision": precision, "steps": 4, "clip_norm": 10.0, "optimizer": {"name": "sgd", "lr": 0.01}}
    pools[1].run(ran, {**options, "precision": "fp64"}, str(tmp_path / "wide"))
    pools[2].run(ran, options, str(tmp_path / "run"))
    found, near = losses(tmp_path / "run"), 1e-4 if precision == "fp32" else 5e-2
    assert found == pytest.approx(losses(tmp_path / "wide"), rel=near)


def test_voxels_are_judged_by_dice(pools: Pools, tmp_path: Path) -> None:
    source = {"source": f"{HERE}:maps", "test_source": f"{HERE}:maps", "test_args": {"samples": 3, "seed": 1}}
    model = {"name": f"{HERE}:painter"}
    tables = {"steps": 3, "batch": 2, "loss": "dice+cross_entropy", "model": model, "data": source}
    one = pools[1].run(ran, tables, str(tmp_path / "one"))[0]
    two = pools[2].run(ran, {**tables, "plan": {"strategy": "spatial"}}, str(tmp_path / "two"))[0]
    assert 0 <= one["eval"]["dice"] <= 1
    assert two["eval"]["dice_classes"] == pytest.approx(one["eval"]["dice_classes"], rel=1e-9)
    assert two["final_loss"] == pytest.approx(one["final_loss"], rel=1e-9)


def test_a_pipeline_trains_and_another_mesh_goes_on(pools: Pools, tmp_path: Path) -> None:
    still = {"steps": 6, "model": {"name": f"{HERE}:smooth"}}
    pools[1].run(ran, still, str(tmp_path / "whole"))
    pools[2].run(ran, {**still, "steps": 4, "plan": {"strategy": "pipeline"}}, str(tmp_path / "run"))
    pools[2].run(ran, still, str(tmp_path / "run"), True)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-9)
