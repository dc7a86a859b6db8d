"""Ranks that only count steps, and fail as a test says: `python -m tests.supervise.scripted FOLDER [--resume]`.

`FOLDER/faults.json` lists faults: the rank, the step after which it happens, what happens, and how often.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from convmesh.supervise.following import ROOM, follow_supervisor, wanted_ranks
from convmesh.supervise.host_supervisor import supervise_host
from convmesh.supervise.policy import Job, Policy
from convmesh.supervise.pulse import Phase, pulse
from convmesh.supervise.supervisor import supervise

STEPS, SAVE_EVERY = 400, 5


def fault(rank: int, step: int, do: str, times: int = 1) -> dict[str, Any]:
    return {"rank": rank, "step": step, "do": do, "times": times}


def job(folder: Path, *faults: dict[str, Any]) -> Job:
    folder.mkdir(exist_ok=True)
    (folder / "faults.json").write_text(json.dumps(faults), encoding="utf-8")
    return Job([sys.executable, "-m", "tests.supervise.scripted", str(folder)], folder)


def starts(folder: Path) -> list[tuple[int, int]]:
    """The number of ranks and the first step of each generation."""
    lines = (folder / "starts").read_text(encoding="utf-8").splitlines()
    return [(int(ranks), int(step)) for ranks, step in map(str.split, lines)]


def pids(folder: Path) -> list[int]:
    return [int(path.name) for path in (folder / "pids").iterdir()]


def hangs_here() -> None:
    time.sleep(1000)


def _happens(folder: Path, number: int, each: dict[str, Any], step: int) -> bool:
    if (each["rank"], each["step"]) != (int(os.environ["RANK"]), step):
        return False
    with (folder / f"fault{number}").open("a+", encoding="utf-8") as file:
        file.write("x")
        file.flush()
        return file.tell() <= int(each["times"])


def _meeting(folder: Path) -> Path:
    """Where the ranks of a generation meet. A port may come again; after a refusal there are fewer ranks."""
    here = folder / f"steps{os.environ['MASTER_PORT']}of{os.environ['WORLD_SIZE']}"
    here.mkdir(exist_ok=True)
    return here


def _together(folder: Path, step: int) -> None:
    """Wait until all ranks are here, as they do in collectives."""
    here = _meeting(folder)
    (here / f"{step}-{os.environ['RANK']}").touch()
    for rank in range(int(os.environ["WORLD_SIZE"])):
        while not (here / f"{step}-{rank}").exists():
            if (here / "told").exists():  # as ranks hear why another one failed
                sys.stderr.write("convmesh: another rank told why\n")
                sys.exit(2)
            time.sleep(0.002)


def _is_room_asked_for(folder: Path, step: int, is_first: bool) -> bool:
    """As the first rank sees it."""
    seen = _meeting(folder) / f"room{step}"
    if is_first and pulse().is_asked_for_room:
        seen.touch()
    _together(folder, -step)
    return seen.exists()


def _fails(folder: Path, step: int) -> None:
    for number, each in enumerate(json.loads((folder / "faults.json").read_text(encoding="utf-8"))):
        if _happens(folder, number, each, step):
            match each["do"].split():
                case ["exit", status]:
                    sys.stderr.write("convmesh: told why\n")
                    (_meeting(folder) / "told").touch()
                    sys.exit(int(status))
                case ["chatter"]:
                    sys.stdout.writelines(f"line {line}\n" for line in range(200_000))
                    sys.stdout.flush()
                    hangs_here()
                case ["hang"]:
                    hangs_here()
                case ["await"]:
                    while int(os.environ["WORLD_SIZE"]) < (wanted_ranks() or 0) and not pulse().is_asked_for_room:
                        time.sleep(0.01)
                case [name]:
                    os.kill(os.getpid(), signal.Signals[name])


def _saved(folder: Path) -> int:
    file = folder / "checkpoint"
    return int(file.read_text(encoding="utf-8")) if file.exists() else 0


def _stop(number: int, frame: object) -> None:
    del frame
    sys.exit(128 + number)


def train(folder: Path, resume: bool) -> None:
    """A rank's life."""
    (folder / "pids").mkdir(exist_ok=True)
    (folder / "pids" / str(os.getpid())).touch()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    follow_supervisor()
    is_first, ranks = os.environ["RANK"] == "0", os.environ["WORLD_SIZE"]
    pulse().beat(Phase.SETTING_UP, seconds=60)
    _fails(folder, -int(ranks))
    step = _saved(folder) if resume else 0
    if is_first:
        with (folder / "starts").open("a", encoding="utf-8") as file:
            file.write(f"{ranks} {step}\n")
    pulse().begin(step)
    while step < STEPS:
        _together(folder, step)
        _fails(folder, step)
        step += 1
        pulse().beat(Phase.TRAINING, step)
        if step % SAVE_EVERY == 0 and is_first:
            (folder / "checkpoint").write_text(str(step), encoding="utf-8")
        if step % SAVE_EVERY == 0 and step < STEPS and _is_room_asked_for(folder, step, is_first):
            sys.exit(128 + ROOM)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if wanted_ranks() is None:
        work = Job([sys.executable, "-m", "tests.supervise.scripted", str(place)], place)
        if len(sys.argv) == 2:
            sys.exit(supervise(work, Policy(3, seconds_backoff=1000)))
        given = {
            "hosts": 2,
            "ranks": 2,
            "seconds_host": 4.0,
            "seconds_backoff": 1000,
            **json.loads("".join(sys.argv[3:]) or "{}"),
        }
        hosts = given.pop("hosts")
        sys.exit(supervise_host(work, Policy(**given), sys.argv[2], hosts))
    train(place, "--resume" in sys.argv)
