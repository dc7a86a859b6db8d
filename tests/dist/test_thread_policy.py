"""Threads of ranks on processors are batch work: messages do not interrupt those that compute."""

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from convmesh import Mesh, open_mesh
from convmesh.dist.thread_policy import VARIABLE, let_computing_go_on, move_threads
from convmesh.testing import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="SCHED_BATCH is Linux's")


def policies() -> set[int]:
    """Of all threads of this process."""
    return {os.sched_getscheduler(int(thread.name)) for thread in Path("/proc/self/task").iterdir()}


def as_usual() -> None:
    """Undo what the suite itself does: its processes are batch work, too."""
    let_computing_go_on.cache_clear()
    move_threads(os.SCHED_BATCH, os.SCHED_OTHER)


def policies_on_a_mesh(setting: str) -> set[int]:
    """After messages along an axis of a mesh that was opened when Gloo had its first threads."""
    as_usual()
    os.environ[VARIABLE] = setting
    mesh = open_mesh(Mesh(height=2))
    dist.all_reduce(torch.ones(1), group=mesh.background(("height",)))
    return policies()


@pytest.mark.parametrize(("setting", "expected"), [("1", "SCHED_BATCH"), ("0", "SCHED_OTHER")])
def test_all_threads_are_batch_work_unless_told_otherwise(setting: str, expected: str) -> None:
    assert run_ranks(2, policies_on_a_mesh, setting) == 2 * [{getattr(os, expected)}]


def policy_of_a_thread_with_its_own() -> tuple[int, int]:
    """Of a thread that somebody made idle work, and of this one."""
    as_usual()
    is_made, is_done = threading.Event(), threading.Event()

    def idle() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        is_made.set()
        is_done.wait()

    thread = threading.Thread(target=idle)
    thread.start()
    is_made.wait()
    try:
        assert let_computing_go_on()
        assert thread.native_id is not None
        return os.sched_getscheduler(thread.native_id), os.sched_getscheduler(0)
    finally:
        is_done.set()
        thread.join()


def test_threads_with_a_policy_of_their_own_keep_it() -> None:
    assert run_ranks(1, policy_of_a_thread_with_its_own) == [(os.SCHED_IDLE, os.SCHED_BATCH)]
