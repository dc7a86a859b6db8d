"""Supervisors of real processes that are killed, stopped, refused and interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from convmesh.supervise.generation import Generation
from convmesh.supervise.journal import Journal
from convmesh.supervise.outcome import Ending
from convmesh.supervise.policy import Policy
from convmesh.supervise.supervisor import supervise
from convmesh.supervise.world import World, free_port
from tests.supervise.scripted import STEPS, fault, job, pids, starts


def test_a_killed_rank_is_done_without_and_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = fault(1, 8, "SIGKILL"), fault(0, STEPS - 100, "await")
    assert supervise(job(tmp_path, *faults), Policy(3, seconds_backoff=0.3)) == 0
    (_, first), (_, second), (_, third) = starts(tmp_path)
    assert [ranks for ranks, _ in starts(tmp_path)] == [3, 2, 3]
    assert (first, second) == (0, 5)
    assert third % 5 == 0
    assert 5 < third < STEPS
    lost, grown = Journal(tmp_path).events()
    assert (lost["kind"], lost["ranks_before"], lost["ranks_after"]) == ("lost", 3, 2)
    assert "rank 1 was killed by SIGKILL" in lost["what"]
    assert (grown["kind"], grown["ranks_before"], grown["ranks_after"]) == ("grown", 2, 3)
    assert "goes on with 2 of 3 ranks" in capsys.readouterr().err
    assert "rank 1 was killed by SIGKILL" in (tmp_path / "log.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("SIGSTOP", "rank 1 after step 8, training: its process is stopped"),
        ("hang", "rank 1 after step 8, training: hang"),
    ],
)
def test_a_silent_rank_is_named(how: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = Policy(2, seconds_timeout=3.0, seconds_backoff=1000)
    assert supervise(job(tmp_path, fault(1, 8, how)), policy) == 0
    assert [ranks for ranks, _ in starts(tmp_path)] == [2, 1]
    assert f"no answer for 3 s: {told}" in capsys.readouterr().err


def test_without_elasticity_a_failure_is_the_end(tmp_path: Path) -> None:
    assert supervise(job(tmp_path, fault(1, 8, "SIGKILL")), Policy(2, is_elastic=False)) == 128 + signal.SIGKILL
    assert len(starts(tmp_path)) == 1


@pytest.mark.parametrize(("status", "step"), [(2, 8), (3, -2), (1, 0)])
def test_mistakes_and_errors_before_the_first_step_are_not_tried_again(
    status: int, step: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert supervise(job(tmp_path, fault(1, step, f"exit {status}")), Policy(2)) == status
    assert len(list((tmp_path / "pids").iterdir())) == 2
    assert capfd.readouterr().err.count("told why") == 1


def test_a_full_disk_is_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = Policy(2, min_ranks=2, seconds_backoff=0.1)
    assert supervise(job(tmp_path, fault(1, 8, "exit 74", times=2)), policy) == 0
    assert starts(tmp_path) == [(2, 0), (2, 5), (2, 5)]
    told = "rank 1 cannot write to the run folder; goes on from the last checkpoint when 2 ranks are back"
    assert told in capsys.readouterr().err


def test_a_number_of_ranks_without_a_plan_is_passed_over(tmp_path: Path) -> None:
    faults = fault(3, 8, "SIGKILL"), fault(0, -3, "exit 3")
    assert supervise(job(tmp_path, *faults), Policy(4, seconds_backoff=1000)) == 0
    assert starts(tmp_path) == [(4, 0), (2, 5)]
    assert [event["kind"] for event in Journal(tmp_path).events()] == ["lost", "shrunk"]


def test_a_run_that_gets_nowhere_is_given_up(tmp_path: Path) -> None:
    policy = Policy(2, min_ranks=2, max_restarts=1, seconds_backoff=0.0)
    assert supervise(job(tmp_path, fault(1, 8, "SIGKILL", times=9)), policy) == 128 + signal.SIGKILL
    assert starts(tmp_path) == [(2, 0), (2, 5), (2, 5)]
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert "--max-restarts (=1)" in summary["failed"]
    assert [event["kind"] for event in summary["events"]] == ["lost", "lost", "failed"]


def test_what_a_rank_prints_does_not_fill_the_disk(tmp_path: Path) -> None:
    """Its end is kept: the last lines of a rank that fails are shown."""
    world = World(2, 2, (0, 1), port=free_port())
    generation = Generation(world, job(tmp_path, fault(1, 8, "chatter")).command, 60.0)
    talker = generation.ranks[1]
    output, most = Path(f"/proc/{talker.pid}/fd/1"), 0

    def is_over() -> bool:
        nonlocal most
        most = max(most, output.stat().st_size)
        return "line 199999\n" in talker.last_words() and output.stat().st_size < 1 << 20

    assert generation.wait(is_over).ending is Ending.ELSEWHERE
    assert most > 0
    assert talker.last_words() == "".join(f"line {line}\n" for line in range(199_980, 200_000))
    generation.close()


def started(folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.supervise.scripted", str(folder)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_during_a_restart_leaves_nothing_behind(tmp_path: Path) -> None:
    job(tmp_path, fault(1, 8, "SIGKILL"), fault(0, -2, "hang"))
    process = started(tmp_path)
    assert process.stderr is not None
    assert "goes on with 2 of 3 ranks" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in errors
    assert "after step 0" not in errors
    assert not [pid for pid in pids(tmp_path) if Path(f"/proc/{pid}").exists()]


def test_ranks_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    job(tmp_path, fault(1, 8, "hang"))
    process = started(tmp_path)
    while not (tmp_path / "fault0").exists():
        time.sleep(0.01)
        assert process.poll() is None
    handles = [os.pidfd_open(pid) for pid in pids(tmp_path)]
    process.kill()
    process.communicate(timeout=120)
    for handle in handles:
        assert wait([handle], 60), "a rank is left"
        os.close(handle)
