"""The test cluster itself does what it claims; and supervisors on its hosts, whose ranks only count steps."""

import json
import struct
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from convmesh.supervise.journal import Journal
from tests.cluster.cluster import Cluster, why_not
from tests.cluster.line import MOST_SECONDS_QUEUED, Line, Link
from tests.cluster.pair import Pair
from tests.cluster.training import await_that
from tests.cluster.wire import bytes_on_wire
from tests.supervise.scripted import fault, job, starts

needs_hosts = pytest.mark.skipif(bool(why_not()), reason=why_not())

ECHO = """
import socket
server = socket.create_server(("10.77.0.2", 5000))
print("ready", flush=True)
connection, _ = server.accept()
while text := connection.recv(1 << 20):
    connection.sendall(text[:1])
"""
ASK = """
import json, socket, sys, time
connection = socket.create_connection(("10.77.0.2", 5000))
for line in sys.stdin:
    began = time.monotonic()
    connection.sendall(bytes(int(line)))
    connection.recv(1)
    print(time.monotonic() - began, flush=True)
"""


def test_a_line_delivers_when_latency_and_bandwidth_say_so() -> None:
    line = Line(Link(megabits_per_second=8.0, seconds_latency=0.5), seed=0)
    assert line.arrival(0.0, 1000) == pytest.approx(0.501)
    assert line.arrival(0.0, 1000) == pytest.approx(0.502), "the second waits for the first"
    assert line.arrival(9.0, 1000) == pytest.approx(9.501)
    assert line.arrival(9.0, int(1e6 * MOST_SECONDS_QUEUED)) is not None
    assert line.arrival(9.0, 1) is None, "the queue is full"


def test_a_line_loses_the_share_that_it_claims() -> None:
    line = Line(Link(loss=0.02), seed=0)
    lost = sum(line.arrival(float(second), 1000) is None for second in range(20_000))
    assert lost == pytest.approx(400, rel=0.15)


def seconds_to_answer(asking: "subprocess.Popen[str]", bytes_sent: int) -> float:
    assert asking.stdin is not None
    assert asking.stdout is not None
    asking.stdin.write(f"{bytes_sent}\n")
    asking.stdin.flush()
    return float(asking.stdout.readline())


@needs_hosts
def test_links_of_a_cluster_are_late_slow_and_cut() -> None:
    with Cluster(2, wired=True) as cluster:
        echo = cluster.hosts[1].start([sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
        assert echo.stdout is not None
        assert echo.stdout.readline() == "ready\n"
        asking = cluster.hosts[0].start([sys.executable, "-c", ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        quick = min(seconds_to_answer(asking, 1) for _ in range(5))
        cluster.shape(1, Link(seconds_latency=0.1))
        late = min(seconds_to_answer(asking, 1) for _ in range(3))
        assert 0.2 <= late < 0.3 + quick
        cluster.cut(1)
        mending = threading.Timer(0.5, cluster.mend, [1])
        mending.start()
        assert seconds_to_answer(asking, 1) > 0.5
        mending.join()
        cluster.crash(1)
        assert echo.wait() == -9
        assert cluster.hosts[1].processes() == []
        cluster.hosts[0].kill()
        asking.communicate()
        echo.communicate()


@needs_hosts
def test_a_plain_link_has_its_bandwidth() -> None:
    """2 MB at 40 Mbit/s take 0.4 s; a burst of a few packets is free."""
    with Cluster(2, Link(40.0)) as cluster:
        echo = cluster.hosts[1].start([sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
        assert echo.stdout is not None
        echo.stdout.readline()
        code = ASK.replace("connection.recv(1)", "connection.shutdown(1)\n    while connection.recv(65536): pass")
        asked = cluster.hosts[0].start([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        seconds = float(asked.communicate("2000000\n")[0])
        assert 0.38 < seconds < 2.0
        echo.communicate()
        assert 2_000_000 < cluster.bytes_sent(0) < 2_400_000


@needs_hosts
def test_a_pair_has_the_bandwidth_and_latency_that_it_is_given() -> None:
    """2 MB at 80 Mbit/s take 0.2 s, and more with headers; then an answer has to come back."""
    with Pair(Link(80.0, 0.02)) as pair:
        echo = pair.hosts[1].start([sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
        assert echo.stdout is not None
        echo.stdout.readline()
        code = ASK.replace("connection.recv(1)", "connection.shutdown(1)\n    while connection.recv(65536): pass")
        asked = pair.hosts[0].start([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        seconds = float(asked.communicate("2000000\n")[0])
        assert 0.248 < seconds < 2.0
        echo.communicate()


def test_a_parcel_is_as_long_as_its_packets() -> None:
    """Two full packets and one of a byte, each with 66 bytes of headers; one that is not cut is as long as it is."""
    head = struct.pack("<BBHHHH", 1, 1, 66, 1448, 0, 0)
    assert bytes_on_wire(head + bytes(66 + 2 * 1448 + 1)) == 3 * 66 + 2 * 1448 + 1
    assert bytes_on_wire(struct.pack("<BBHHHH", 0, 0, 0, 0, 0, 0) + bytes(90)) == 90


PORT = 29400


def host(cluster: Cluster, index: int, folder: Path, **options: float) -> "subprocess.Popen[str]":
    places = ",".join(f"{each.address}:{PORT}" for each in cluster.hosts)
    command = [sys.executable, "-m", "tests.supervise.scripted", str(folder), places, json.dumps(options)]
    return cluster.hosts[index].start(command, stderr=subprocess.PIPE)


def await_server(cluster: Cluster, index: int) -> None:
    """Until a host's supervisor serves a store."""
    listens = f":{PORT:04X} 00000000:0000 0A"
    await_that(lambda: listens in cluster.hosts[index].run("cat", "/proc/net/tcp"), f"a server on h{index}")


def await_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def has_happened(folder: Path, times: int) -> bool:
    """Whether the first fault has happened so often."""
    file = folder / "fault0"
    return file.exists() and file.stat().st_size >= times


def are_started(folder: Path, ranks: int) -> bool:
    return starts(folder)[-1][0] == ranks


@needs_hosts
def test_hosts_that_could_not_reach_each_other_meet_when_they_can(tmp_path: Path) -> None:
    """Until then each of them serves a store and waits for the other one's ranks."""
    job(tmp_path)
    with Cluster(2) as cluster:
        cluster.cut(1)
        supervisors = [host(cluster, index, tmp_path, min_ranks=4, seconds_start=0.5) for index in range(2)]
        for index in range(2):
            await_server(cluster, index)
        cluster.mend(1)
        told = [each.communicate(timeout=120)[1] for each in supervisors]
        assert [each.returncode for each in supervisors] == [0, 0]
        assert f"goes to 10.77.0.1:{PORT}, where others meet" in told[1]
        assert starts(tmp_path) == [(4, 0)]


@pytest.mark.full
@needs_hosts
def test_hosts_that_were_parted_in_training_meet_when_they_can(tmp_path: Path) -> None:
    """Neither side has ranks enough to go on alone."""
    job(tmp_path, fault(0, 8, "hang"))
    with Cluster(2) as cluster:
        supervisors = [host(cluster, index, tmp_path, min_ranks=4) for index in range(2)]
        await_file(tmp_path / "fault0")
        cluster.cut(1)
        await_server(cluster, 1)
        cluster.mend(1)
        for each in supervisors:
            each.communicate(timeout=120)
            assert each.returncode == 0
        assert starts(tmp_path) == [(4, 0), (4, 5)]


@pytest.mark.full
@needs_hosts
def test_a_host_that_was_cut_off_goes_where_the_others_train(tmp_path: Path) -> None:
    """The first host has too few ranks to go on; the others go on at the second place, where it then joins them."""
    job(tmp_path, fault(0, 8, "hang"), fault(0, 300, "await"))
    with Cluster(3) as cluster:
        supervisors = [host(cluster, index, tmp_path, hosts=3, min_ranks=4) for index in range(3)]
        await_file(tmp_path / "fault0")
        cluster.cut(0)
        await_that(partial(are_started, tmp_path, 4), "ranks of two hosts")
        cluster.mend(0)
        told = [each.communicate(timeout=120)[1] for each in supervisors]
        assert [each.returncode for each in supervisors] == [0, 0, 0]
        assert f"goes to 10.77.0.2:{PORT}, where others meet" in told[0]
        assert [ranks for ranks, _ in starts(tmp_path)] == [6, 4, 6]


@pytest.mark.full
@needs_hosts
def test_three_hosts_lead_one_after_the_other(tmp_path: Path) -> None:
    """The first crashes, then the second, which has led since then; the third brings the run to its end alone."""
    job(tmp_path, fault(0, 8, "hang", times=2))
    with Cluster(3) as cluster:
        supervisors = [host(cluster, index, tmp_path) for index in range(3)]
        for lost, ranks in ((0, 4), (1, 2)):
            await_that(partial(has_happened, tmp_path, lost + 1), "a hang")
            cluster.crash(lost)
            supervisors[lost].communicate()
            await_that(partial(are_started, tmp_path, ranks), f"{ranks} ranks")
        _, told = supervisors[2].communicate(timeout=120)
        assert supervisors[2].returncode == 0
        assert "led by h2" in told


@needs_hosts
@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_host_that_crashes_is_done_without(lost: int, tmp_path: Path) -> None:
    """Also the one where supervisors met and the first rank was: nobody is told, and the other one goes on."""
    job(tmp_path, fault(0, 8, "hang"))
    with Cluster(2) as cluster:
        supervisors = [host(cluster, index, tmp_path) for index in range(2)]
        await_file(tmp_path / "fault0")
        cluster.crash(lost)
        supervisors[lost].communicate()
        _, told = supervisors[1 - lost].communicate(timeout=120)
        assert supervisors[1 - lost].returncode == 0
        assert ("lost 10.77.0.1:29400 (timed out), where supervisors met" if lost == 0 else "host h1 is silent") in told
        assert starts(tmp_path) == [(4, 0), (2, 5)]
        assert [event["kind"] for event in Journal(tmp_path).events()] == ["lost"]
