"""Rank pools shared by all tests, and the meshes on which every split operator is tested."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from convmesh.testing import RankPool, SplitCase
from tests.draws import examples

# Ranks do this when they open a mesh (convmesh/dist/thread_policy.py); here the whole suite is batch work, so that two
# workers let each other finish, too: a third less system time.
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported, which torch does late
os.environ["CONVMESH_SYSTEMS"] = "no-systems-of-the-user-in-tests"

settings.register_profile(
    "ranks",
    max_examples=examples(6),
    deadline=None,
    derandomize=True,
    print_blob=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("noshrink", settings.get_profile("ranks"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("ranks")


def end_with_parent() -> None:
    """A rank that stands still would not notice that the tests were killed."""
    death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)


class TurnPool(RankPool):
    """Ranks that stand still unless it is their pool's turn: Gloo wakes each idle rank a hundred times a second."""

    _awake: TurnPool | None = None

    def __init__(self, n: int) -> None:
        super().__init__(n, seconds_timeout=900)
        self.run(end_with_parent)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        if TurnPool._awake is not self:
            if TurnPool._awake is not None:
                TurnPool._awake._send(signal.SIGSTOP)
            self._send(signal.SIGCONT)
            TurnPool._awake = self
        return super().run(fn, *args)

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid or 0, number)


class Pools:
    """One pool per rank count, forked when first needed and again after a failure."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __getitem__(self, n: int) -> RankPool:
        if n not in self._pools or not self._pools[n].is_open:
            self._pools[n] = TurnPool(n)
        return self._pools[n]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


LONG = (
    "test_elastic_training.py", "test_docs.py", "test_train_verb.py", "test_release.py", "test_calibrate.py",
    "test_nnunet_guide.py", "test_batch_sweep.py", "test_examples.py", "test_mixed_plans.py", "test_support.py",
)  # fmt: skip
"""Files of few tests that take long, most of them because they start processes, the longest first."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers begin with long files and end with files of few short tests, so that none works alone in the end."""
    if hasattr(config, "workerinput"):
        tests = Counter(item.path for item in items)
        place = {name: number for number, name in enumerate(LONG)}
        items.sort(key=lambda item: (place.get(item.path.name, len(LONG)), -tests[item.path], str(item.path)))


def pytest_collection_finish() -> None:
    """What imports have left lives until the end: garbage collection, here and in ranks, need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(scope="session", autouse=True)
def pools() -> Iterator[Pools]:
    opened = Pools()
    if Path("/dev/nvidiactl").exists():
        # With a CUDA build of torch, a process that ran a backward pass (planning does) cannot fork ranks that train.
        for ranks in (1, 2, 3, 4, 6, 8):
            opened[ranks]
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def check(pools: Pools) -> Callable[[SplitCase], None]:
    """Run a split case on the ranks of its mesh."""

    def run(case: SplitCase) -> None:
        pools[case.mesh.size].run(SplitCase.check, case)

    return run
