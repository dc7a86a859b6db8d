"""Supervisors that stand for hosts, of which one is killed and comes back."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from convmesh.supervise import coordinator
from convmesh.supervise.coordinator import Heritage
from convmesh.supervise.journal import Journal
from convmesh.supervise.policy import Policy
from convmesh.supervise.rendezvous import Rendezvous
from convmesh.supervise.run_token import run_token
from convmesh.supervise.telling import Telling
from convmesh.supervise.world import free_port
from tests.supervise.scripted import fault, job, starts


def host(folder: Path, port: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.supervise.scripted", str(folder), f"127.0.0.1:{port}"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def await_server(port: int) -> None:
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return


@pytest.mark.full
def test_a_lost_host_is_done_without_and_comes_back(tmp_path: Path) -> None:
    """Four ranks of two hosts hang at a step; one host dies, two ranks go on; a new host joins, and there are four."""
    job(tmp_path, fault(0, 8, "hang"), fault(1, 300, "await"))
    port = free_port()
    first = host(tmp_path, port)
    assert first.stderr is not None
    await_server(port)
    second = host(tmp_path, port)
    while not (tmp_path / "fault0").exists():
        time.sleep(0.01)
        assert (first.poll(), second.poll()) == (None, None)
    second.kill()
    second.communicate(timeout=120)
    assert "is silent; goes on from the last checkpoint" in first.stderr.readline()
    third = host(tmp_path, port)
    for each in (first, third):
        each.communicate(timeout=120)
        assert each.returncode == 0
    assert starts(tmp_path)[:2] == [(4, 0), (2, 5)]
    assert starts(tmp_path)[2][0] == 4
    assert [event["kind"] for event in Journal(tmp_path).events()] == ["lost", "grown"]


def test_a_host_says_for_which_others_it_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and not before some time has passed."""
    policy = Policy(2, min_ranks=3)
    meeting = Rendezvous(f"127.0.0.1:{free_port()}", policy, run_token(tmp_path))
    for seconds, said in ((1000.0, ""), (0.0, f"convmesh: {WAITS}.\n")):
        monkeypatch.setattr(coordinator, "SECONDS_UNTOLD", seconds)
        leader = coordinator.Coordinator(meeting, policy, 2, Telling(tmp_path))
        for _ in range(3):
            meeting.beat(2, 1)
            leader.look()
        assert capsys.readouterr().err == said
    meeting.close()


def test_a_new_leader_goes_on_where_hosts_say_that_the_run_has_begun(tmp_path: Path) -> None:
    """A supervisor that is started again knows nothing of the generations before, nor does one that led none."""
    policy, token = Policy(2), run_token(tmp_path)
    for hosts, says in ((1, False), (1, True), (Heritage(1), False), (Heritage(1), True)):
        meeting = Rendezvous(f"127.0.0.1:{free_port()}", policy, token)
        if says:
            meeting.set(coordinator.BEGUN, True)
        meeting.beat(2, 1)
        coordinator.Coordinator(meeting, policy, hosts, Telling(tmp_path)).look()
        assert meeting.get("world/0")["again"] is says
        meeting.close()


def test_a_rank_that_was_killed_is_to_blame_and_not_one_that_crashed_beside_it(tmp_path: Path) -> None:
    """Before the first step a crash would come again, and ends a run; where connections are opened it may be torch's
    own word for a neighbour that is gone."""
    policy = Policy(1, min_ranks=2)
    place, token = f"127.0.0.1:{free_port()}", run_token(tmp_path)
    leads, follows = Rendezvous(place, policy, token), Rendezvous(place, policy, token)
    leader = coordinator.Coordinator(leads, policy, 2, Telling(tmp_path))
    for each in (leads, follows):
        each.beat(1, 1)
    leader.look()
    for each, status in ((leads, 1), (follows, 128 + signal.SIGKILL)):
        ended = {"ending": "LOST", "status": status, "ranks": [each.member], "reason": "told"}
        each.set(f"report/0/{each.member}", {**ended, "step": 0, "step_of_all": 0, "began": -1})
    leader.look()
    assert leads.get("end") is None
    assert leader.waits, "for the ranks of the next generation"
    follows.close()
    leads.close()


WAITS = "waits for 2 hosts (`--hosts`) and 3 ranks (`--min-ranks`): 1 host with 2 ranks is here"
