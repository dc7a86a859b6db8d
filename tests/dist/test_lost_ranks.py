"""A rank that is gone is told as such by those that wait for it, whatever they are computing."""

import multiprocessing
import os
import platform
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import convmesh as cm
from convmesh.dist.agreement import problems_of
from convmesh.dist.flat_buffers import FlatBuffer, start_sum
from convmesh.dist.open_mesh import OpenMesh
from convmesh.errors import LostRankError

SECONDS = 60


def operator(mesh: OpenMesh) -> None:
    x: Any = cm.shard(torch.zeros(1, 1, 8, 8), mesh, {2: "height"})
    F.conv2d(x, torch.zeros(1, 1, 3, 3), padding=1)


def gradient_sum(mesh: OpenMesh) -> None:
    start_sum(FlatBuffer(4, torch.float32, mesh), mesh, ("height",)).wait()


def question(mesh: OpenMesh) -> None:
    del mesh
    assert dist.group.WORLD is not None
    problems_of(dist.group.WORLD, 2, None)


def left_behind(rank: int, folder: Path, doing: Callable[[OpenMesh], None]) -> None:
    """Both ranks do it once, so that they are connected; then rank 1 is killed, and rank 0 does it again."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    mesh = cm.open_mesh(cm.Mesh(height=2))
    doing(mesh)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(LostRankError) as caught:
        doing(mesh)
    (folder / "told").write_text(str(caught.value), encoding="utf-8")


@pytest.mark.parametrize(
    ("doing", "where"),
    [(operator, "ops/convolution/"), (gradient_sum, "dist/flat_buffers.py"), (question, "dist/agreement.py")],
)
def test_waiting_for_a_rank_that_is_gone_says_so(doing: Callable[[OpenMesh], None], where: str, tmp_path: Path) -> None:
    """By the function that waits, not what carries all transfers, unless nothing of ours called that.

    Ranks of a pool end together, so these are processes of their own.
    """
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=left_behind, args=(rank, tmp_path, doing), daemon=True) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(SECONDS)
        each.kill()
    told = (tmp_path / "told").read_text(encoding="utf-8")
    assert told.startswith(f"rank 0 of 2, on {platform.node()}, lost a rank that it waited for in ")
    assert f"(convmesh/{where}" in told
    assert "x.gather()" not in told
