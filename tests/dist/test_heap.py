"""Freed memory stays with its process: the OS does not clear again what every step touches."""

import os
import resource

import pytest
import torch

from convmesh.dist.heap import VARIABLE, keep_freed_memory
from convmesh.testing import run_ranks

BYTES_ROW = 8 << 20


def faults_of_steps(setting: str) -> int:
    """Page faults of the last of several rounds that allocate, touch and free as a step does."""
    os.environ[VARIABLE] = setting
    keep_freed_memory.cache_clear()
    kept = keep_freed_memory()
    assert kept == (setting != "0")
    faults = 0
    for _ in range(8):  # the first rounds settle the heap
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(BYTES_ROW * size, dtype=torch.uint8) for size in (1, 5, 2, 6)]
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        del tensors
    return faults


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="glibc is Linux's")
def test_a_step_touches_memory_that_the_process_still_has() -> None:
    (kept,), (given_back,) = run_ranks(1, faults_of_steps, "1"), run_ranks(1, faults_of_steps, "0")
    assert given_back > 10_000
    assert kept < given_back / 20
