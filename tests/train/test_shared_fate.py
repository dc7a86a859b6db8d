"""A rank that fails while training takes the others with it, and all say why."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from convmesh import ConvMeshError, RunError, Trainer
from convmesh.testing import RankPool, run_ranks
from convmesh.train.shared_fate import shared_fate, together
from convmesh.train.step_record import StepRecord
from convmesh.train.training import train_run
from tests.train.runs import HERE, config, lines

Pools = dict[int, RankPool]


def fails_alone() -> str:
    """Rank 1 meets an error between two sums; the others wait for it in the second."""
    with pytest.raises(Exception) as caught, shared_fate():  # noqa: PT011, PT012
        torch.distributed.all_reduce(torch.zeros(1))
        if torch.distributed.get_rank() == 1:
            raise MemoryError("not enough of it")
        torch.distributed.all_reduce(torch.zeros(1))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_the_others_learn_why_a_rank_failed() -> None:
    first, second, third = run_ranks(3, fails_alone)
    assert second == "MemoryError: not enough of it"
    assert first == third == "RunError: rank 1 failed: MemoryError: not enough of it"


def refused_by_one() -> str:
    with pytest.raises(ConvMeshError) as caught, together():  # noqa: PT012
        if torch.distributed.get_rank() == 1:
            raise RunError("no disk here")
    return str(caught.value)


def test_what_one_rank_refuses_all_refuse(pools: Pools) -> None:
    assert pools[2].run(refused_by_one) == ["no disk here"] * 2


def broken(folder: str, source: str = "spoiled") -> str:
    tables: dict[str, Any] = {"data": {"source": f"{HERE}:{source}"}}
    with pytest.raises(ConvMeshError) as caught:
        train_run(config(**tables), Path(folder))
    return str(caught.value)


def test_samples_that_the_network_does_not_take_are_told_with_their_shape(pools: Pools, tmp_path: Path) -> None:
    for told in pools[2].run(broken, str(tmp_path), "coloured"):
        assert "layer `0` (Conv2d(1, 4" in told
        assert "Samples of `data.source` are (3, 8, 8), channels first" in told
        assert "add_channel = true" in told


def test_data_that_are_no_numbers_end_the_run_on_every_rank_and_leave_the_folder_free(
    pools: Pools, tmp_path: Path
) -> None:
    for told in pools[2].run(broken, str(tmp_path)):
        assert "not finite" in told
    train = pools[1].run(ran_once, str(tmp_path))[0]
    assert train == 2


def ran_once(folder: str) -> int:
    steps: int = train_run(config(steps=2), Path(folder), resume=True)[0]["steps"]
    return steps


def stopped_by_one(folder: str) -> tuple[int, int]:
    """Rank 1 is told to stop after its third step."""
    trainer_hook = StopsAtThree()
    with pytest.MonkeyPatch.context() as patch:
        fit = Trainer.fit
        patch.setattr(Trainer, "fit", lambda self, **options: fit(self, **options, hooks=[trainer_hook.on(self)]))
        summary, number = train_run(config(), Path(folder))
    return summary["steps"], number


class StopsAtThree:
    """A hook, as users write them."""

    def on(self, trainer: Trainer) -> "StopsAtThree":
        self._stopping = trainer.stopping
        return self

    def after_step(self, record: StepRecord) -> None:
        if record.step == 3 and torch.distributed.get_rank() == 1:
            self._stopping.request(signal.SIGTERM)


def test_ranks_agree_on_the_step_after_which_they_stop(pools: Pools, tmp_path: Path) -> None:
    first, second = pools[2].run(stopped_by_one, str(tmp_path))
    assert first == second
    steps, number = first
    assert 4 <= steps < 15
    assert number == signal.SIGTERM
    assert (tmp_path / "checkpoints" / str(steps)).is_dir()
    assert len(lines(tmp_path)) == steps
