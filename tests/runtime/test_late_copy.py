"""A save returns before its values are copied: the next update waits for the copy, and other changes are noticed."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from convmesh import Checkpointer, Mesh
from convmesh.errors import CheckpointError
from convmesh.runtime.late_copy import LateCopy
from convmesh.testing import RankPool
from tests.checkpoint.runs import Run


def test_an_update_waits_for_the_copy() -> None:
    weight, saved = nn.Parameter(torch.ones(4)), torch.zeros(4)
    weight.grad = torch.ones(4)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    copy = LateCopy([(saved, weight.detach())])
    update = threading.Thread(target=optimizer.step)
    update.start()
    update.join(timeout=0.1)
    assert update.is_alive()
    copy.make()
    update.join(timeout=60)
    assert not update.is_alive()
    assert torch.equal(saved, torch.ones(4))
    assert torch.equal(weight.detach(), torch.zeros(4))


def test_values_that_change_before_they_are_copied_are_an_error() -> None:
    weight, saved = torch.ones(4), torch.zeros(4)
    copy = LateCopy([(saved, weight)])
    weight += 1
    with pytest.raises(CheckpointError, match="weights changed while they were being saved"):
        copy.make()
    copy.wait()  # which an update would do


def saved_between_updates(folder: Path) -> float:
    """How far each of several saves is from the weights at its call, when an update follows at once."""
    run, at, worst = Run(Mesh(data=2), "data"), Checkpointer(folder, keep=None), 0.0
    expected = []
    for step in range(5):
        run.net(
            run.net.shard_input(torch.randn(8, 2, 8, 8).double()), run.net.shard_target(torch.arange(8) % 5)
        ).backward()
        expected.append(run.net.full_state_dict())
        at.save(step, run.net, run.optimizer)
        run.optimizer.step()
    at.wait()
    for step, weights in enumerate(expected):
        at.load(run.net, run.optimizer, step)
        found = run.net.full_state_dict()
        worst = max(worst, *(float((found[name] - value).abs().max()) for name, value in weights.items()))
    return worst


def test_a_save_holds_the_weights_of_its_call(pools: dict[int, RankPool], tmp_path: Path) -> None:
    assert pools[2].run(saved_between_updates, tmp_path / "run") == [0.0, 0.0]
