"""Real ranks: results, failures, deaths and hangs."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from convmesh.testing import RankError, RankPool, run_ranks


def test_closures_run_and_results_come_in_rank_order() -> None:
    offset = 10
    assert run_ranks(3, lambda step: offset + step * dist.get_rank(), 2) == [10, 12, 14]


def test_ranks_are_one_job() -> None:
    def total() -> tuple[int, float]:
        number = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(number)
        return dist.get_world_size(), number.item()

    assert run_ranks(4, total) == [(4, 6.0)] * 4


def test_a_result_may_be_an_exception() -> None:
    (result,) = run_ranks(1, lambda: ValueError("returned"))
    assert isinstance(result, ValueError)


def test_a_failing_rank_shows_its_whole_traceback() -> None:
    def deeper() -> None:
        raise ValueError("too deep")

    def fail() -> None:
        if dist.get_rank() == 1:
            deeper()

    with pytest.raises(RankError) as raised:
        run_ranks(2, fail)
    text = str(raised.value)
    assert text.startswith("rank 1 of 2 failed:\nTraceback (most recent call last):\n")
    assert "in fail" in text
    assert "in deeper" in text
    assert text.rstrip().endswith("ValueError: too deep")


def test_the_first_failure_is_reported_before_its_consequences() -> None:
    def fail() -> None:
        if dist.get_rank() == 2:
            raise ValueError("the cause")
        dist.barrier()

    with pytest.raises(RankError) as raised:
        run_ranks(3, fail)
    assert str(raised.value).startswith("rank 2 of 3 failed:\n")


def test_a_result_that_cannot_travel_fails_clearly() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 of 1 failed:.*pickle"):
        run_ranks(1, threading.Lock)


@pytest.mark.parametrize("waits", [True, False], ids=["others wait for it", "others return"])
def test_a_rank_that_dies_is_noticed_at_once(waits: bool) -> None:
    def die() -> None:
        if dist.get_rank() == 1:
            os._exit(7)
        if waits:
            dist.barrier()

    begin = time.monotonic()
    with pytest.raises(RankError) as raised:
        run_ranks(3, die, seconds_timeout=240)
    assert str(raised.value).startswith("rank 1 of 3 died with exit code 7 before it returned.")
    assert time.monotonic() - begin < 120


def test_a_rank_that_is_killed_says_by_which_signal() -> None:
    with pytest.raises(RankError, match="rank 0 of 1 died with exit code -9 before it returned"):
        run_ranks(1, lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_a_hang_ends_at_the_limit_with_the_stack_of_the_hung_rank() -> None:
    def wait_for_nobody() -> None:
        if dist.get_rank() == 1:
            threading.Event().wait()

    begin = time.monotonic()
    with pytest.raises(RankError) as raised:
        run_ranks(2, wait_for_nobody, seconds_timeout=3)
    text = str(raised.value)
    assert text.startswith("ranks [1] of 2 did not return within 3 s.\nrank 1 hung at:\n")
    assert "in wait_for_nobody" in text
    assert time.monotonic() - begin < 120


def test_a_hang_inside_a_collective_shows_the_call() -> None:
    def both_receive() -> None:
        dist.recv(torch.zeros(1), src=1 - dist.get_rank())

    with pytest.raises(RankError, match="in both_receive"):
        run_ranks(2, both_receive, seconds_timeout=3)


def test_ranks_work_after_the_parent_ran_operators_on_several_threads() -> None:
    def convolve() -> float:
        return float(F.conv2d(torch.ones(2, 8, 64, 64), torch.ones(8, 8, 3, 3), padding=1).sum())

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = convolve()
        F.conv2d(torch.ones(2, 8, 64, 64, requires_grad=True), torch.ones(8, 8, 3, 3)).sum().backward()
        assert run_ranks(2, convolve) == [expected] * 2
    finally:
        torch.set_num_threads(before)


def rank_plus(number: int) -> int:
    return dist.get_rank() + number


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("on purpose")
    dist.barrier()


def vanish() -> None:
    os._exit(3)


@pytest.fixture
def pool() -> Iterator[RankPool]:
    with RankPool(2) as opened:
        yield opened


def test_a_pool_runs_many_calls(pool: RankPool) -> None:
    assert [pool.run(rank_plus, number) for number in range(3)] == [[0, 1], [1, 2], [2, 3]]
    assert pool.is_open


def test_a_failure_closes_the_pool_and_a_new_one_works(pool: RankPool) -> None:
    with pytest.raises(RankError, match="on purpose"):
        pool.run(fail_on, 0)
    assert not pool.is_open
    with RankPool(2) as again:
        assert again.run(rank_plus, 5) == [5, 6]


def test_pools_of_several_sizes_live_side_by_side(pool: RankPool) -> None:
    with RankPool(3) as other:
        assert other.run(rank_plus, 0) == [0, 1, 2]
        with pytest.raises(RankError, match="died with exit code 3"):
            other.run(vanish)
    assert pool.run(rank_plus, 1) == [1, 2]


def test_a_rank_that_died_between_calls_is_reported(pool: RankPool) -> None:
    victim = pool.run(os.getpid)[1]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 of 2 died with exit code -9"):
        pool.run(rank_plus, 0)


def test_ranks_end_when_their_parent_is_killed() -> None:
    code = (
        "import os; from convmesh.testing import RankPool; pool = RankPool(2);"
        "print(len(pool.run(os.getpid)), flush=True); os.kill(os.getpid(), 9)"
    )
    # The ranks inherit standard output, so it ends when the last of them does.
    killed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=600, check=False)
    assert (killed.returncode, killed.stdout) == (-9, b"2\n")
