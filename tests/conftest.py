"""Rank pools shared by all tests, and the grids that every split operator is tried on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from convmesh.testing import RankPool, SplitCase

settings.register_profile(
    "ranks",
    max_examples=6,
    deadline=None,
    derandomize=True,
    print_blob=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("ranks")


class Pools:
    """One pool a rank count, forked when first needed and again after a failure broke it."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __getitem__(self, n: int) -> RankPool:
        if n not in self._pools or not self._pools[n].is_open:
            self._pools[n] = RankPool(n, seconds_timeout=60)
        return self._pools[n]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    opened = Pools()
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def check(pools: Pools) -> Callable[[SplitCase], None]:
    """Run a split case on as many ranks as its mesh has."""

    def run(case: SplitCase) -> None:
        pools[case.mesh.size].run(SplitCase.check, case)

    return run
