"""A crash at any moment leaves the newest complete checkpoint, and nothing that stands in the way of the next save."""

import contextlib
import os
import random
import shutil
import signal
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from convmesh import Checkpointer, Mesh
from convmesh.testing import RankError, run_ranks
from tests.checkpoint.recorded_disk import recording, replay
from tests.checkpoint.runs import Run
from tests.conftest import Pools
from tests.draws import examples


def weight(run: Run) -> float:
    return float(run.net.get_parameter("enter.weight").detach().double().sum())


def crash_everywhere(folder: Path, again: bool) -> int:
    """Save a third checkpoint, the second time over the second, and try the folder after each operation of that."""
    run, disk = Run(Mesh(data=1), "data"), folder / "disk"
    at = Checkpointer(disk, asynchronous=False)
    sums = {}
    for step in (1, 2):
        run.step(step)
        run.save(at, step)
        sums[step] = {weight(run)}
    shutil.copytree(disk, folder / "before")
    run.step(3)
    third = 2 if again else 3
    sums.setdefault(third, set()).add(weight(run))
    with recording() as operations:
        run.save(at, third)
    reached = []
    for count in range(len(operations) + 1):
        for kept in (0.0, 0.5, 1.0):
            after = folder / "after"
            shutil.copytree(folder / "before", after)
            are_loose = replay(operations[:count], disk, after, kept)
            reached.append(check_folder(run, after, sums))
            shutil.rmtree(after)
            if not are_loose:
                break
    assert (reached[0], reached[-1]) == (2, third)
    assert reached == sorted(reached)
    return len(operations)


def check_folder(run: Run, folder: Path, sums: dict[int, set[float]]) -> int:
    """What a crash left behind loads without a warning, and the next save leaves a clean folder."""
    at = Checkpointer(folder, asynchronous=False)
    step = run.load(at)
    assert weight(run) in sums[step]
    latest = int((folder / "latest").read_text())
    assert latest <= step
    assert latest in at.steps()
    run.save(at, 9)
    names = {path.name for path in folder.iterdir()}
    assert names == {str(step), "9", "latest"}
    return step


@pytest.mark.parametrize("again", [False, True])
def test_crash_after_every_operation(pools: Pools, again: bool) -> None:
    memory = Path("/dev/shm")  # a hundred folders, each synchronised many times
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        (count,) = pools[1].run(crash_everywhere, Path(folder), again)
    assert count > 15


def save_for_ever(run: Run, at: Checkpointer, first: int, acknowledged: Path) -> None:
    """Write all the time, and note what is known to be saved."""
    for step in range(first + 1, first + 100_000):
        with torch.no_grad():
            run.net.get_parameter("enter.bias").fill_(step)
        run.save(at, step)
        at.wait()
        acknowledged.write_text(str(step))


def load_after_kill(run: Run, folder: Path) -> int:
    """The step that a new run finds; its weights are those of that step."""
    step = run.load(Checkpointer(folder))
    assert step == 0 or float(run.net.get_parameter("enter.bias").detach().max()) == step
    return step


def kill_often(folder: Path, kills: int) -> int:
    """Fork a process that saves, kill it at a random moment, look at what it left, and so on in the same folder."""
    run, acknowledged, chance = Run(Mesh(data=1), "data"), folder / "acknowledged", random.Random(7)
    acknowledged.write_text("0")
    step = 0
    for _ in range(kills):
        if not (child := os.fork()):
            with contextlib.suppress(BaseException):
                save_for_ever(run, Checkpointer(folder), step, acknowledged)
            os._exit(1)
        threading.Event().wait(chance.uniform(0.0, 0.25))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        step = load_after_kill(run, folder)
        # The note itself may have been cut off by the kill.
        assert step >= int(acknowledged.read_text() or 0)
    return step


def test_killed_at_many_moments(pools: Pools, tmp_path: Path) -> None:
    (step,) = pools[1].run(kill_often, tmp_path, examples(25))
    assert step > 0


def save_until_killed(folder: Path, seed: int) -> None:
    """Two ranks save all the time; after the first checkpoint each kills itself at a moment of its own."""
    run, at = Run(Mesh(filter=2), "filter"), Checkpointer(folder)
    chance, first = random.Random(2 * seed + run.net.mesh.rank), run.load(at)
    run.net.get_parameter("enter.bias").data.fill_(first + 1)
    run.save(at, first + 1)
    at.wait()
    threading.Timer(chance.uniform(0.0, 0.4), os.kill, (os.getpid(), signal.SIGKILL)).start()
    save_for_ever(run, at, first + 1, folder.parent / f"acknowledged-{run.net.mesh.rank}")


def load_on_others(folder: Path) -> int:
    return load_after_kill(Run(Mesh(data=2), "data"), folder)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))])
def test_killed_ranks_lose_nothing_that_was_saved(pools: Pools, tmp_path: Path, seed: int) -> None:
    with pytest.raises(RankError, match="died with exit code -9"):
        run_ranks(2, save_until_killed, tmp_path / "checkpoints", seed)
    step, other = pools[2].run(load_on_others, tmp_path / "checkpoints")
    assert step == other
    known = [int(path.read_text() or 0) for path in tmp_path.glob("acknowledged-*")]
    assert step >= max(known, default=1)
