"""Tests with several ranks run twice: Gloo stages messages through the host, NCCL sends them from the GPU."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from convmesh.testing import RankPool
from tests.conftest import end_with_parent

SECONDS_TIMEOUT = 280.0


def nccl_takes_several() -> bool:
    """Whether NCCL lets ranks share the GPU (from 2.30 on, where asked to), or there is a GPU for each of four."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" or len([*Path("/dev").glob("nvidia[0-9]*")]) >= 4


@pytest.fixture(params=["gloo", "nccl"])
def backend(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    if chosen == "nccl" and not nccl_takes_several():
        pytest.skip("NCCL needs a GPU for each rank, or 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1")
    return chosen


class GpuPools:
    """Ranks by number and backend, which stay up between tests: starting CUDA takes longer than most of them."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, str], RankPool] = {}

    def of(self, ranks: int, backend: str) -> RankPool:
        """A pool, forked when it is first needed and again after a failure."""
        key = ranks, backend
        if key not in self._pools or not self._pools[key].is_open:
            self._pools[key] = RankPool(ranks, seconds_timeout=SECONDS_TIMEOUT, backend=backend)
            self._pools[key].run(end_with_parent)
        return self._pools[key]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session", autouse=True)
def pools() -> Iterator[GpuPools]:
    """In place of the pools of all other tests, which would be forked here too."""
    opened = GpuPools()
    yield opened
    opened.close()


Ranks = Callable[[int], RankPool]


@pytest.fixture
def ranks(pools: GpuPools, backend: str) -> Ranks:
    """Kept ranks on the test's backend."""
    return lambda count: pools.of(count, backend)
