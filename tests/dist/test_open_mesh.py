"""Opening meshes: groups, agreement, and jobs of one process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from convmesh.dist import OpenMesh, init, open_mesh
from convmesh.dist.told_values import values_of_all
from convmesh.errors import DisagreementError, MeshError
from convmesh.layout import Mesh
from convmesh.private_torch.gloo_groups import THREADS
from convmesh.testing import opened, run_ranks
from tests.conftest import Pools


def group_sums(mesh: Mesh) -> dict[tuple[str, ...], int]:
    """The sum of ranks over every group that this rank is in."""
    open_here = opened(mesh)
    sums = {}
    for axes in open_here.groups:
        number = torch.tensor([open_here.rank])
        dist.all_reduce(number, group=open_here.group(axes))
        sums[axes] = int(number.item())
    return sums


@pytest.mark.parametrize("mesh", [Mesh(data=2, height=2, width=2), Mesh(depth=4, width=2), Mesh(filter=8)], ids=str)
def test_there_is_a_group_for_every_set_of_axes(mesh: Mesh, pools: Pools) -> None:
    for rank, sums in enumerate(pools[8].run(group_sums, mesh)):
        assert len(sums) == 2 ** len(mesh.axes) - 1
        assert sums == {axes: sum(mesh.group(axes, rank)) for axes in sums}


def same_group() -> bool:
    mesh = opened(Mesh(height=2, width=2))
    return mesh.group(["width", "height"]) is mesh.group(("height", "width")) is mesh.everyone


def test_a_group_is_found_for_any_order_of_its_axes(pools: Pools) -> None:
    assert pools[4].run(same_group) == [True] * 4


def shared_groups() -> bool:
    one, two = open_mesh(Mesh(data=2, width=2)), open_mesh(Mesh(data=2, depth=2))
    return one.group(["data"]) is two.group(["data"])


def test_meshes_over_the_same_ranks_share_connections(pools: Pools) -> None:
    assert pools[4].run(shared_groups) == [True] * 4


def threads_added_by_two_groups() -> int:
    before = len(os.listdir("/proc/self/task"))
    opened(Mesh(data=2, height=2))  # along data, along height; the job's own group is the third
    return len(os.listdir("/proc/self/task")) - before


def test_groups_have_workers_but_share_one_event_loop() -> None:
    """Each loop wakes a hundred times a second, also when nothing is sent."""
    assert run_ranks(4, threads_added_by_two_groups) == [2 * THREADS] * 4


def test_ranks_of_the_mesh_and_of_the_job() -> None:
    def describe() -> tuple[int, list[int], int] | None:
        if dist.get_rank() in (0, 2):
            return None
        mesh = open_mesh(Mesh(depth=2), ranks=[3, 1])
        return mesh.rank, [mesh.world_rank(rank) for rank in range(2)], mesh.mesh.size

    assert run_ranks(4, describe) == [None, (1, [3, 1], 2), None, (0, [3, 1], 2)]


def agreement(values: list[str], problems: list[str | None]) -> str:
    mesh = opened(Mesh(width=len(values)))
    try:
        mesh.agree("`it`", values[mesh.rank], problems[mesh.rank])
    except DisagreementError as error:
        return str(error)
    return "agreed"


def test_agreement(pools: Pools) -> None:
    assert pools[3].run(agreement, ["a"] * 3, [None] * 3) == ["agreed"] * 3


def test_a_problem_of_one_rank_is_raised_on_all(pools: Pools) -> None:
    expected = "`it`: rank 1: too small, rank 2: too big"
    assert pools[3].run(agreement, ["a", "b", "c"], [None, "too small", "too big"]) == [expected] * 3


def test_a_difference_names_the_ranks_and_says_what_this_one_has(pools: Pools) -> None:
    expected = (
        "`it` must be the same on every rank, but digests differ: ca978112ca1b on ranks 0, 2; 3e23e8160039 on ranks 1."
        " Here: {}"
    )
    assert pools[3].run(agreement, ["a", "b", "a"], [None] * 3) == [expected.format(here) for here in "aba"]


def test_long_reports_are_cut(pools: Pools) -> None:
    problems: list[str | None] = [f"p{rank}" for rank in range(8)]
    expected = "`it`: rank 0: p0, rank 1: p1, rank 2: p2, rank 3: p3 (and 4 more)"
    assert pools[8].run(agreement, ["a"] * 8, problems) == [expected] * 8


def test_a_report_counts_the_ranks_of_the_mesh_in_its_own_order() -> None:
    def disagree() -> str:
        mesh = open_mesh(Mesh(width=3), ranks=[2, 0, 1])
        with pytest.raises(DisagreementError) as raised:
            mesh.agree("`it`", "", "here" if dist.get_rank() == 0 else None)
        return str(raised.value)

    assert run_ranks(3, disagree) == ["`it`: rank 1: here"] * 3


def agreed_twice() -> int:
    """How often ranks tell each other values in a repeated check."""
    mesh: OpenMesh = open_mesh(Mesh(width=2))
    count = 0

    def spy(*args: Any) -> list[Any]:
        nonlocal count
        count += 1
        return values_of_all(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("convmesh.dist.agreement.values_of_all", spy)
        for _ in range(3):
            mesh.agree_once("`it`", "value")
        mesh.agree_once("`it`", "another")
    return count


def test_a_check_at_the_start_costs_later_steps_nothing(pools: Pools) -> None:
    assert pools[2].run(agreed_twice) == [2, 2]


def test_a_job_of_one_process_needs_no_launcher() -> None:
    code = (
        "import convmesh as cm, torch; cm.init(backend='gloo'); cm.init(); mesh = cm.open_mesh(cm.Mesh());"
        "x = cm.shard(torch.ones(2, 3), mesh, {0: 'data'});"
        "print(mesh.rank, mesh.device, tuple(x.gather().shape))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={})
    assert process.stdout == "0 cpu (2, 3)\n"


def test_a_backend_that_cannot_be_had_is_named() -> None:
    with pytest.raises(MeshError) as raised:
        init(backend="mpi")  # type: ignore[arg-type]
    expected = "`backend` (='mpi') must be 'nccl' (GPUs) or 'gloo' (CPUs, or GPUs through the host)."
    assert str(raised.value) == expected
    if not Path("/dev/nvidiactl").exists():
        with pytest.raises(MeshError, match="needs a GPU, and torch sees none here; use backend='gloo'"):
            init(backend="nccl")


def launched(code: str) -> list[str]:
    """The output of two ranks of a program, launched as users launch them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    process = subprocess.run([*command, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return sorted(process.stdout.splitlines())


def test_a_job_that_a_launcher_started() -> None:
    """Groups have the job's timeout instead of torch's half hour."""
    code = (
        "import convmesh as cm, os, torch; cm.init(77); mesh = cm.open_mesh(cm.Mesh(width=2));"
        "whole = cm.shard(torch.arange(5), mesh, {0: 'width'}).gather().tolist();"
        "alone = cm.open_mesh(cm.Mesh(), ranks=[mesh.rank]).everyone;"
        "seconds = alone._get_backend(torch.device('cpu')).options._timeout.seconds;"
        "os.write(1, f'{mesh.rank} {whole} {seconds}\\n'.encode())"
    )
    assert launched(code) == ["0 [0, 1, 2, 3, 4] 77", "1 [0, 1, 2, 3, 4] 77"]


def test_a_mesh_is_not_opened_before_the_job_is_joined() -> None:
    with pytest.raises(MeshError) as raised:
        open_mesh(Mesh(data=2))
    assert str(raised.value) == "`open_mesh` needs a process group; call `convmesh.init()` first."
