"""Training under a supervisor, with ranks that are killed and stopped from outside."""

import contextlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from convmesh.supervise.policy import Job, Policy
from convmesh.supervise.supervisor import supervise
from convmesh.train.config_files import load_config
from convmesh.train.training import train_run
from tests.conftest import Pools

STEPS, SAVE_EVERY = 40, 3
RUN = f"""
batch = 8
steps = {STEPS}
precision = "fp64"
loss = "tests.supervise.test_elastic_training:awaits_its_strike"
model.name = "lenet5"
data.source = "digits"
data.args = {{ samples = 64 }}
data.test_args = {{ samples = 16 }}
plan.strategy = "data"
plan.predict = false
checkpoint.every_steps = {SAVE_EVERY}
checkpoint.every_epochs = 0
evaluation.every_epochs = 0
"""


STRUCK = "CONVMESH_TEST_STRUCK"
"""In the ranks' environment: a file that is there once a signal has been sent."""

calls = itertools.count()


def awaits_its_strike(output: Any, target: Any) -> torch.Tensor:
    """Cross entropy. Rank 1 stops half-way until it was struck, so that no run ends before."""
    if next(calls) > STEPS // 2 and os.environ.get("RANK") == "1":
        while not Path(os.environ[STRUCK]).exists():
            time.sleep(0.01)
    return cross_entropy(output, target)


def job(folder: Path) -> Job:
    (folder / "run.toml").write_text(RUN, encoding="utf-8")
    command = [sys.executable, "-m", "convmesh", "train", str(folder / "run.toml"), "--run", str(folder / "run")]
    return Job(command, folder / "run")


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def process_of(rank: int) -> int:
    """The process of a rank that this process has started."""
    wanted = {f"RANK={rank}", f"CONVMESH_LAUNCHER={os.getpid()}"}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # others end meanwhile
            if wanted <= {*path.read_bytes().decode(errors="replace").split("\0")}:
                return int(path.parent.name)
    raise LookupError(rank)


def strike(folder: Path, step: int, number: signal.Signals, rank: int = 1) -> threading.Thread:
    """Send a signal to a rank after so many steps."""

    def watch() -> None:
        metrics = folder / "run" / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < step:
            time.sleep(0.01)
        os.kill(process_of(rank), number)
        Path(os.environ[STRUCK]).touch()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.fixture(autouse=True)
def struck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STRUCK, str(tmp_path / "struck"))


def trained(path: str, folder: Path) -> None:
    train_run(load_config(path), folder)


@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), pytest.param(3, 1, marks=pytest.mark.full)])
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(
    ranks: int, rank: int, tmp_path: Path, pools: Pools
) -> None:
    """All ranks, then one less, then all again: the losses are those of one process without a break.

    Rank 0 holds the run folder and the store where ranks meet; no other is worse to lose.
    """
    at = random.randint(SAVE_EVERY + 1, 12)
    strike(tmp_path, at, signal.SIGKILL, rank)
    assert supervise(job(tmp_path), Policy(ranks, seconds_timeout=120.0, seconds_backoff=0.1)) == 0

    summary: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    events = summary["events"]
    assert [event["kind"] for event in events] == ["started", "lost", "resumed", "grown", "resumed"]
    assert [event["ranks_after"] for event in events] == [ranks, ranks - 1, ranks - 1, ranks, ranks]
    assert (summary["steps"], summary["ranks"], summary["restarts"]) == (STEPS, ranks, 2)
    assert f"rank {rank} was killed by SIGKILL" in events[1]["what"]
    assert events[1]["step"] - events[2]["step"] <= 2 * SAVE_EVERY  # the one before may be in flight
    assert events[4]["step"] == events[3]["step"]
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert all(event["what"] in log for event in events)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text(encoding="utf-8"))
    assert environment["command"] == sys.argv  # that of the supervisor, which people typed

    pools[1].run(trained, str(tmp_path / "run.toml"), tmp_path / "whole")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-9)


def test_a_stopped_rank_is_named_with_what_the_others_wait_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strike(tmp_path, 4, signal.SIGSTOP)
    assert supervise(job(tmp_path), Policy(2, is_elastic=False, seconds_timeout=5.0)) == 1
    told = capsys.readouterr().err
    assert "no answer for 5 s: rank 1 after step" in told
    assert "its process is stopped (SIGSTOP or a debugger); rank 0 after step" in told
    assert ".py:" in told
    assert "(convmesh/dist/" not in told, "the operation that waits, not what carries all transfers"
    assert not losses(tmp_path / "run")[STEPS - 1 :]
