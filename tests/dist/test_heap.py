"""Freed memory stays with its process: what a step touches again is not cleared again by the system."""

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
    found = 0
    for _ in range(8):  # the first few find out where everything fits
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(BYTES_ROW * size, dtype=torch.uint8) for size in (1, 5, 2, 6)]
        found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        del tensors
    return found


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="glibc is Linux's")
def test_a_step_touches_memory_that_the_process_still_has() -> None:
    (kept,), (given_back,) = run_ranks(1, faults_of_steps, "1"), run_ranks(1, faults_of_steps, "0")
    assert given_back > 10_000
    assert kept < given_back / 20
