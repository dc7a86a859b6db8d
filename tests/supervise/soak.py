"""Runs that go on for long, on this machine: nothing may pile up in the supervisor, its ranks, or the system.

python -m tests.supervise.soak restarts 1000      a rank is killed again and again, each time after a new checkpoint
python -m tests.supervise.soak steps 100000       many tiny steps

Prints what is held on the way, and ends with status 1 if it grew.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from convmesh.supervise.policy import Job, Policy
from convmesh.supervise.supervisor import supervise

RUN = """
batch = 4
epochs = 1000000
loss = "cross_entropy"
model.name = "tests.supervise.soak:tiny"
data.source = "digits"
data.args = { samples = 64 }
data.test_args = { samples = 16 }
plan = { strategy = "data", predict = false }
evaluation.every_epochs = 0
checkpoint.every_epochs = 0
"""

RANKS, LOOKS = 2, 10
BYTES_GROWTH = 8 << 20
"""So much more memory than at the first look may be the allocator's; a leak in every step or restart is more."""


def tiny() -> object:
    """A network whose step costs next to nothing."""
    from torch import nn

    return nn.Sequential(nn.Conv2d(1, 2, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 8 * 8, 10))


@dataclass(frozen=True)
class Held:
    """What a process and its children hold."""

    processes: int
    open_files: int
    threads: int
    sockets: int
    shared_memory: int
    temporary_files: int
    bytes_memory: int

    @classmethod
    def now(cls, process: int) -> Held:
        """Of one process; its children, shared memory and temporary files are the system's to tell."""
        files = [os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if path.exists()]
        return cls(
            processes=len(children_of(process)),
            open_files=len(files),
            threads=len([*Path(f"/proc/{process}/task").iterdir()]),
            sockets=sum(file.startswith("socket:") for file in files),
            shared_memory=len([*Path("/dev/shm").iterdir()]),
            temporary_files=len([*Path(tempfile.gettempdir()).iterdir()]),
            bytes_memory=_bytes_resident(process),
        )


def _bytes_resident(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children_of(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())


def grew(looks: list[Held]) -> list[str]:
    """What there is more of at the end than at the first look."""
    first, last = looks[0], looks[-1]
    names = [name for name in Held.__annotations__ if name != "bytes_memory"]
    more = [name for name in names if getattr(last, name) > getattr(first, name)]
    return [*more, *["bytes_memory"] * (last.bytes_memory > first.bytes_memory + BYTES_GROWTH)]


class Killer(threading.Thread):
    """Kills a rank whenever the run has saved since the last time, then ends the run."""

    def __init__(self, folder: Path, times: int) -> None:
        super().__init__(daemon=True)
        self._latest, self._times = folder / "checkpoints" / "latest", times
        self.looks: list[Held] = []

    def run(self) -> None:
        saved = 0
        for time_ in range(self._times):
            saved = self._await_save(saved)
            if (time_ + 1) % max(1, self._times // LOOKS) == 0:
                self.looks.append(Held.now(os.getpid()))
                print(time_ + 1, *astuple(self.looks[-1]), sep="\t", flush=True)
            os.kill(random.choice(children_of(os.getpid())), signal.SIGKILL)
        self._await_save(saved)
        os.kill(os.getpid(), signal.SIGTERM)

    def _await_save(self, saved: int) -> int:
        while not self._latest.exists() or (step := int(self._latest.read_text().split()[0])) <= saved:
            time.sleep(0.01)
        return step


def restarts(folder: Path, times: int) -> list[Held]:
    killer = Killer(folder / "run", times)
    killer.start()
    policy = Policy(RANKS, min_ranks=RANKS, seconds_timeout=120.0, seconds_backoff=0.0)
    status = supervise(Job(_command(folder, "--checkpoint.every-steps", "1"), folder / "run"), policy)
    assert status == 128 + signal.SIGTERM, status
    assert not children_of(os.getpid()), "ranks are left"
    return killer.looks


def steps(folder: Path, count: int) -> list[Held]:
    """A rank is looked at: it is what steps."""
    command = _command(folder, "--steps", str(count), "--ranks", str(RANKS))
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    looks = []
    for done in _progress(folder / "run" / "metrics.jsonl", count, run):
        looks.append(Held.now(children_of(run.pid)[0]))
        print(done, *astuple(looks[-1]), sep="\t", flush=True)
    assert run.wait() == 0
    return looks


def _progress(metrics: Path, count: int, run: subprocess.Popen[bytes]) -> Iterator[int]:
    """The steps done, each time that a tenth more is; without the last, when ranks leave."""
    done = 0
    for look in range(1, LOOKS):
        while done < count * look // LOOKS:
            assert run.poll() is None, "the run has ended"
            time.sleep(0.2)
            done = sum(1 for _ in metrics.open("rb")) if metrics.exists() else 0
        yield done


def _command(folder: Path, *options: str) -> list[str]:
    file = folder / "run.toml"
    file.write_text(RUN, encoding="utf-8")
    return [sys.executable, "-m", "convmesh", "train", str(file), "--run", str(folder / "run"), *options]


def main() -> None:
    what, count = {"restarts": restarts, "steps": steps}[sys.argv[1]], int(sys.argv[2])
    print("after", *Held.__annotations__, sep="\t")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = f"{folder}/tmp"  # the system's is everybody's
        Path(tempfile.tempdir).mkdir()
        looks = what(Path(folder), count)
    print(f"{count} {sys.argv[1]} in {time.monotonic() - begun:.0f} s; grew: {', '.join(grew(looks)) or 'nothing'}")
    sys.exit(1 if grew(looks) else 0)


if __name__ == "__main__":
    main()
