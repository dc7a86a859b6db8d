"""What can happen to a run on two hosts, one rank on each, and how it is done."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from convmesh.checkpoint.step_folders import newest_first
from convmesh.train.run_folder import checkpoints_of
from tests.cluster.line import Link
from tests.cluster.training import SECONDS_MOST, Training, await_that

SECONDS_TIMEOUT = 20
"""`--timeout-seconds` of the runs."""

FIRST, OTHER = 0, 1
"""The host of the first rank, where supervisors meet, and the other one."""


@dataclass(frozen=True)
class Fault:
    """One row of the table."""

    name: str
    strike: Callable[[Training], None]
    """Called while the run trains."""
    tells: str = ""
    """A regular expression of what supervisors must say."""
    ends: tuple[int, ...] = (FIRST, OTHER)
    """Hosts whose supervisors must end well."""
    is_wired: bool = False
    keeps_world: bool = True
    """Whether the run waits for all ranks to come back; else it goes on with those left."""
    seconds_pace: float = 0.15
    """How long a step takes at least."""
    is_small_disk: bool = False
    is_skewed: bool = False
    """Whether the other host's clock is an hour ahead."""


def _rank(run: Training) -> int:
    """The process of one of the ranks."""
    rank = random.randrange(2)
    return run.cluster.hosts[rank].rank(rank)


def kill_rank(run: Training) -> None:
    os.kill(_rank(run), signal.SIGKILL)


def freeze_rank(run: Training) -> None:
    os.kill(_rank(run), signal.SIGSTOP)


def suspend_host(run: Training) -> None:
    """All of the first rank's host stands still for longer than a host may be silent, and then goes on."""
    stopped = run.cluster.hosts[FIRST].processes()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in stopped:
            os.kill(pid, number)
        if number is signal.SIGSTOP:
            time.sleep(45.0)  # what the fault is


def cut_briefly(run: Training) -> None:
    run.cluster.cut(OTHER)
    time.sleep(5.0)  # what the fault is
    run.cluster.mend(OTHER)


def slow_down(run: Training, share: float = 0.1, seconds_turn: float = 0.1) -> None:
    """Let one rank run for a tenth of the time, until its process ends."""
    pid = run.cluster.hosts[OTHER].rank(OTHER)

    def pace() -> None:
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(seconds_turn * (1 - share))
                os.kill(pid, signal.SIGCONT)
                time.sleep(seconds_turn * share)

    threading.Thread(target=pace, daemon=True).start()


def exhaust_memory(run: Training) -> None:
    """From now on the system gives a rank no more memory: half of what it has is its limit."""
    pid = _rank(run)
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") // 2
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


def kill_while_saving(run: Training) -> None:
    """A checkpoint is being written: its folder has another name until it is whole."""
    checkpoints = checkpoints_of(run.folder)
    end, pid = time.monotonic() + SECONDS_MOST, _rank(run)
    while not any("incomplete" in path.name for path in checkpoints.iterdir()):
        if time.monotonic() > end:
            raise TimeoutError("no checkpoint was being written")
    os.kill(pid, signal.SIGKILL)


def corrupt_newest(run: Training) -> None:
    """Bytes of the newest checkpoint change; then a rank dies, so that the run has to read it."""
    await_that(lambda: len(newest_first(checkpoints_of(run.folder))) > 1, "a checkpoint before the newest")
    run.freeze()  # so that it stays the newest
    newest = newest_first(checkpoints_of(run.folder))[0].path
    for file in newest.glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-64:] = bytes(reversed(content[-64:]))
        content[-1] ^= 255
        file.write_bytes(content)
    os.kill(_rank(run), signal.SIGKILL)
    run.thaw()


def start_another(run: Training) -> None:
    """A second run on the same folder, elsewhere: it must be refused."""
    second = run.start_stranger(OTHER)
    status = second.wait(SECONDS_MOST)
    assert status == 2, f"the second run ended with {status}"


def fill_disk(run: Training) -> None:
    """Until a rank has noticed."""
    assert run.folder.is_mount(), "the machine's own disk"
    filler = run.folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    run.await_words(UNWRITABLE)
    filler.unlink()


def forbid_writing(run: Training) -> None:
    """The folder of checkpoints becomes read-only, as a file system does that found an error."""
    folder = str(checkpoints_of(run.folder))
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        read_only = ["mount", "-o", "remount,ro,bind", folder]
        await_that(lambda: subprocess.run(read_only, capture_output=True, check=False).returncode == 0, "read-only")
        run.await_words(UNWRITABLE)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


UNWRITABLE = "cannot write to the run folder"
KILLED = r"on h\d: rank \d was killed by SIGKILL"

FAULTS = (
    Fault("kill -9 of a rank", kill_rank, KILLED),
    Fault("a host crashes", lambda run: run.crash(OTHER), "host h1 is silent", (FIRST,), keeps_world=False),
    Fault(
        "the first rank's host crashes", lambda run: run.crash(FIRST),
        r"lost 10\.77\.0\.1:29400 \(.*led by h1", (OTHER,), keeps_world=False,
    ),
    Fault("SIGSTOP of a rank", freeze_rank, r"on h\d: no answer for 20 s: rank \d after step \d+, .*is stopped \(SIG"),
    Fault("the first rank's host stands still for 45 s", suspend_host, "host h1 is silent"),
    Fault("link cut for 5 s", cut_briefly),
    Fault(
        "link cut for good", lambda run: run.cluster.cut(OTHER), "host h1 is silent", (FIRST,), keeps_world=False
    ),
    Fault("200 ms latency", lambda run: run.cluster.shape(OTHER, Link(seconds_latency=0.1)), is_wired=True),
    Fault("2 % of packets lost", lambda run: run.cluster.shape(OTHER, Link(loss=0.02)), is_wired=True),
    Fault("disk full while saving", fill_disk, f"No space left on device.*{UNWRITABLE}", is_small_disk=True),
    Fault("read-only while saving", forbid_writing, f"Read-only file system.*{UNWRITABLE}"),
    Fault("killed while saving", kill_while_saving, KILLED),
    Fault("newest checkpoint corrupt", corrupt_newest, KILLED),
    Fault("straggler at 10 % speed", slow_down),
    Fault("two runs on one folder", start_another, "is in use by process", seconds_pace=2.0),
    Fault("clock skew of 1 h", kill_rank, KILLED, is_skewed=True),
    Fault("out of memory on a rank", exhaust_memory, r"rank \d"),
)  # fmt: skip
