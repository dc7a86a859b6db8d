"""Damaged files, full disks and mistakes: one clear error or warning, the same on every rank, and nothing lost."""

import contextlib
import json
import os
import resource
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from convmesh import Checkpointer, CheckpointError, CheckpointWarning, Mesh, ShapeError
from convmesh.testing import RankError
from tests.checkpoint.runs import Run
from tests.conftest import Pools
from tests.runtime.pipelines import Small


def save_steps(folder: Path) -> None:
    run, at = Run(Mesh(data=2), "data"), Checkpointer(folder, keep=3)
    for step in (1, 2, 3):
        run.step(step)
        run.save(at, step)
    at.wait()


@pytest.fixture
def saved(pools: Pools, tmp_path: Path) -> Path:
    pools[2].run(save_steps, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def forge(path: Path) -> None:
    """Valid JSON with another value."""
    plain = json.loads(path.read_text())
    plain["state"]["step"] = 7
    path.write_text(json.dumps(plain))


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a bit": ("rank-00001.safetensors", flip, "its SHA-256 differs"),
    "the end of a file": ("rank-00000.safetensors", cut_off, "bytes instead of"),
    "a file": ("rank-00001.safetensors", Path.unlink, "cannot be read: No such file"),
    "the manifest's end": ("manifest.json", cut_off, "it is not JSON"),
    "a number of the manifest": ("manifest.json", forge, "its digest differs"),
}


def load_warned(folder: Path) -> tuple[int, list[str]]:
    run = Run(Mesh(filter=2), "filter")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = run.load(Checkpointer(folder))
    return step, [str(w.message) for w in caught if w.category is CheckpointWarning]


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_checkpoint_is_passed_over(pools: Pools, saved: Path, what: str) -> None:
    file, damage, said = DAMAGE[what]
    damage(saved / "3" / file)
    (step, told), (other, others_told) = pools[2].run(load_warned, saved)
    assert (step, other, others_told) == (2, 2, [])
    (line,) = told
    assert "checkpoint 3 cannot be used" in line
    assert said in line
    assert "\n" not in line


def load_refused(folder: Path, step: int | None) -> str:
    run = Run(Mesh(data=2), "data")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        with pytest.raises(CheckpointError) as caught:
            run.load(Checkpointer(folder), step)
    return str(caught.value)


def test_no_good_checkpoint_is_an_error(pools: Pools, saved: Path) -> None:
    flip(saved / "3" / "rank-00000.safetensors")
    for message in pools[2].run(load_refused, saved, 3):
        assert "checkpoint 3 cannot be used" in message
    for message in pools[2].run(load_refused, saved, 8):
        assert "`step` (=8): there is no such checkpoint" in message
    for step in (1, 2):
        flip(saved / str(step) / "rank-00000.safetensors")
    for message in pools[2].run(load_refused, saved, None):
        assert "There is none to load instead" in message


def retain_good(folder: Path) -> list[int]:
    """A run that had to go back keeps the checkpoint that it came from, not the damaged one."""
    run, at = Run(Mesh(data=2), "data"), Checkpointer(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        assert run.load(at) == 2
    run.save(at, 4)
    at.wait()
    return at.steps()


def test_damaged_checkpoints_are_the_first_to_go(pools: Pools, saved: Path) -> None:
    flip(saved / "3" / "rank-00000.safetensors")
    assert pools[2].run(retain_good, saved) == [[2, 4]] * 2


def fill_disk(folder: Path, limit: int | None) -> tuple[str, float]:
    """A save that does not fit, while training goes on; then one that does."""
    run, at = Run(Mesh(data=2), "data"), Checkpointer(folder)
    run.step(0)
    run.save(at, 1)
    at.wait()
    room = Room(folder, run.net.mesh.rank, limit)
    room.take()
    run.save(at, 2)
    run.step(1)
    with pytest.raises(CheckpointError) as caught:
        at.wait()
    assert at.steps() == [1]
    assert not list(folder.glob(".incomplete*"))
    room.give_back()
    run.save(at, 3)
    loss = run.step(2)
    at.wait()
    again = Run(Mesh(data=2), "data")
    assert again.load(at) == 3
    return str(caught.value), abs(again.step(2) - loss)


class Room:
    """Taken by a limit on the second rank's files, or without one by a file that fills the file system."""

    def __init__(self, folder: Path, rank: int, limit: int | None) -> None:
        self._ballast, self._rank, self._limit = folder.parent / "ballast", rank, limit
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def take(self) -> None:
        if self._limit is not None and self._rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._limit, self._before[1]))
        if self._limit is None and self._rank == 0:
            with contextlib.suppress(OSError), self._ballast.open("ab", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        dist.barrier()

    def give_back(self) -> None:
        dist.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)
        if self._rank == 0:
            self._ballast.unlink(missing_ok=True)
        dist.barrier()


def test_file_that_may_not_grow_is_an_error_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    for message, difference in pools[2].run(fill_disk, tmp_path / "checkpoints", 1000):
        assert "checkpoint 2 in" in message
        assert "rank 1 cannot write" in message
        assert "File too large" in message
        assert difference < 1e-9


def test_full_disk_is_an_error_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=600k", "none", str(tmp_path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        for message, difference in pools[2].run(fill_disk, tmp_path / "checkpoints", None):
            assert "No space left on device" in message
            assert difference < 1e-9
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def mistakes(folder: Path) -> list[str]:
    run, at = Run(Mesh(data=2), "data"), Checkpointer(folder)
    at_once = Checkpointer(folder, asynchronous=False)
    told = []
    for guilty in ((0, 1), (0,)):  # of one rank's mistake the other one hears
        state = {"best": torch.zeros(2)} if run.net.mesh.rank in guilty else {}
        with pytest.raises(CheckpointError) as caught:
            at_once.save(1, run.net, run.optimizer, state)
        told.append(str(caught.value))
    run.save(at, 1)
    at.wait()
    other = Run(Mesh(data=2), "data", kind=torch.optim.SGD)
    with pytest.raises(CheckpointError, match=r"is of AdamW, but `optimizer` is SGD"):
        other.load(at)
    with pytest.raises(ShapeError):
        Run(Mesh(data=2), "data", network=Small).load(at)
    assert at.load(other.net) is not None  # weights alone
    return told


def test_mistakes_are_told_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    for first, second in pools[2].run(mistakes, tmp_path):
        assert "`state` must be JSON" in first
        assert "'best'" in first
        assert "rank 0" in second


@pytest.mark.parametrize("keep", [0, True, 1.5])
def test_keep_must_be_a_number(keep: object) -> None:
    with pytest.raises(CheckpointError, match="`keep`"):
        Checkpointer("folder", keep)  # type: ignore[arg-type]


def dies_before_writing(folder: Path) -> None:
    run, at = Run(Mesh(data=2), "data"), Checkpointer(folder, seconds_timeout=0.5)
    if run.net.mesh.rank == 0:
        run.save(at, 1)
        at.wait()


def test_rank_that_never_saves_is_named(pools: Pools, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0 waited 0\.5 s for rank 1 to write a checkpoint"):
        pools[2].run(dies_before_writing, tmp_path)
