"""Every strategy trains across hosts as it does in one process, and its heaviest traffic stays inside a host."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from convmesh import load_plan
from convmesh.supervise.world import World
from tests.cluster.cluster import Cluster, why_not
from tests.cluster.strategies import MESHES
from tests.cluster.training import ROOT, SECONDS_MOST, Training
from tests.runtime.training import STEPS

PORT = 29500
AS_STARTED, APART = ((0, 1), (2, 3)), ((0, 2), (1, 3))
"""Ranks of two hosts: as every launcher numbers them, and neighbours on different hosts."""

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(why_not()), reason=why_not())]


def on_two_hosts(module: str, placement: tuple[tuple[int, int], tuple[int, int]]) -> list[list[dict[str, Any]]]:
    """What each of four ranks prints."""
    with Cluster(2) as cluster:
        ranks = []
        for host, numbers in zip(cluster.hosts, placement, strict=True):
            for slot, rank in enumerate(numbers):
                world = World(4, 4, (0, 1), rank - slot, cluster.hosts[0].address, PORT, has_other_hosts=True)
                own = {**world.environment(slot), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
                pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
                ranks.append(host.start([sys.executable, "-m", module], env=own, cwd=ROOT, **pipes))
        ends = [rank.communicate(timeout=SECONDS_MOST) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, "".join(errors for _, errors in ends)
    return [[json.loads(line) for line in output.splitlines()] for output, _ in ends]


def test_every_strategy_trains_across_hosts_as_in_one_process() -> None:
    """Each rank compares losses, gradients and weights with those of a single process."""
    for found in on_two_hosts("tests.cluster.strategies", AS_STARTED):
        assert [each["strategy"] for each in found] == list(MESHES)
        assert all(each["bytes_sent"] > 0 for each in found), "nothing passed between the hosts"


def test_the_heaviest_traffic_stays_inside_a_host() -> None:
    """Halos are most of what wide layers send: counted on the link, with the headers of packets."""
    near, apart = (
        [each["crossed"] for (each,) in on_two_hosts("tests.cluster.crossing", ranks)] for ranks in (AS_STARTED, APART)
    )
    assert max(near) < 0.5 * min(apart), (near, apart)


def test_sums_inside_hosts_first_spare_the_link_and_change_no_number() -> None:
    """Of each step's gradients as much crosses as there is of them, not half as much again."""
    for (found,) in on_two_hosts("tests.cluster.levels", AS_STARTED):
        saved = found["one ring"] - found["two levels"]
        assert saved == pytest.approx(STEPS * found["gradients"] / 2, rel=0.15), found
        assert "some are on h0 and some on h1; make it with `ranks_per_host=2`" in found["refused"]


def test_a_run_takes_the_ranks_of_its_hosts(tmp_path: Path) -> None:
    """Hosts of two ranks each sum in two levels; where one has fewer, the run says that it does not."""
    for ranks, summed, says in (
        (2, "hierarchical", ""),
        (1, "bucketed", "gradients are summed over all ranks at once"),
    ):
        folder = tmp_path / summed
        folder.mkdir()
        with Cluster(2) as cluster:
            run = Training(cluster, folder, ["--plan.strategy", "data", "--plan.reduction", "hierarchical"], ranks=2)
            run.start(0)
            run.start(1, "--ranks", str(ranks))
            assert run.ends() == [0, 0], run.told()
        plan = load_plan(run.folder / "plan.toml")
        assert (plan.reduction, plan.ranks_per_host) == (summed, 2 if summed == "hierarchical" else 1)
        assert says in run.told()
