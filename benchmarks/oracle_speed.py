"""Response times of the oracle: a search, a prediction for many GPUs, the help of a verb, whole commands.

python -m benchmarks.oracle_speed            prints the table of benchmarks/oracle_speed.md
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import convmesh as cm
from benchmarks.timing import machine
from convmesh import Mesh, models
from convmesh.cli.exits import Exit
from convmesh.oracle import predict_programs
from convmesh.planner.predicting import programs_of, representatives

REPEATS = 3
SYSTEM = "dgx-a100"
LARGEST = {
    "data": Mesh(data=65_536),
    "data+spatial": Mesh(data=4096, height=4, width=4),
    "data+filter": Mesh(data=8192, filter=8),
    "data+pipeline": Mesh(pipe=16, data=4096),
}


COMMANDS = {
    "plan unet3d --input 1x128x128x128 --batch 84 --gpus 672": 10.0,
    "scale resnet50 --gpus 1..4096": 20.0,
    **{f"plan {name} --gpus 64": 5.0 for name in models.names()},
}
"""What a user types, without the system, and the seconds of one core that it may take."""


@dataclass(frozen=True)
class Took:
    """The time of the first run, which a user waits for, and the least of several."""

    name: str
    first: float
    least: float
    goal: float

    def __str__(self) -> str:
        verdict = "met" if self.first < self.goal else "missed"
        return f"| {self.name} | {self.first:.2f} | {self.least:.2f} | < {self.goal:g} s: {verdict} |"


def took(name: str, call: Callable[[], object], goal: float) -> Took:
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return Took(name, times[0], min(times), goal)


def search() -> Took:
    """All presets over all meshes, then mixes by layer."""
    with torch.device("meta"):
        model = models.create("resnet50")
    return took(
        "full search, resnet50, 4,096 GPUs",
        lambda: cm.search(model, (131_072, 3, 224, 224), SYSTEM, gpus=4096),
        10.0,
    )


def predict(strategy: str) -> Took:
    """Prediction time after lowering."""
    with torch.device("meta"):
        model = models.create("resnet50")
    mesh = LARGEST[strategy]
    plan = cm.plan(model, (65_536 * 16, 3, 224, 224), mesh, strategy)
    programs, system = programs_of(plan, representatives(mesh, borders=True)), cm.System.load(SYSTEM)

    def evaluated() -> tuple[float, ...]:
        prediction = predict_programs(programs, system)
        return prediction.seconds_step, prediction.bytes_memory, prediction.bytes_sent, prediction.joules_step

    return took(f"predict, resnet50, {strategy}, 65,536 GPUs", evaluated, 1.0)


def help_of_plan() -> Took:
    """In a separate process, without torch."""
    verb = [sys.executable, "-m", "convmesh", "plan", "--help"]
    return took("`convmesh plan --help`", lambda: subprocess.run(verb, check=True, capture_output=True), 0.5)


def run(command: list[str], folder: str) -> None:
    """One process on one thread, with compiled bytecode, as an installed package has it."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, cwd=folder, env={**kept, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode in (Exit.DONE, Exit.NO_PLAN), done.stderr


def warm_up() -> None:
    """Compile what a first run would compile."""
    with tempfile.TemporaryDirectory() as folder:
        for verb in ("plan lenet5 --gpus 4", "scale lenet5 --gpus 1..4"):
            run([sys.executable, "-m", "convmesh", *verb.split()], folder)


def command(verb: str, goal: float) -> Took:
    """Seconds of one core, user and system, of a whole process: others may use the machine, too."""
    with tempfile.TemporaryDirectory() as folder:
        whole = [sys.executable, "-m", "convmesh", *verb.split(), "--system", SYSTEM, "--json"]
        before = os.times()
        run(whole, folder)
        after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return Took(f"`convmesh {verb}`", seconds, seconds, goal)


def main() -> None:
    torch.set_num_threads(1)
    print(f"{datetime.date.today()}, {machine()}, one thread; command: `python -m benchmarks.oracle_speed`\n")
    print("| what | first of three s | least s | goal |\n| --- | --- | --- | --- |")
    print(help_of_plan(), flush=True)
    for strategy in LARGEST:
        print(predict(strategy), flush=True)
    print(search(), flush=True)
    warm_up()
    for verb, goal in COMMANDS.items():
        print(command(verb, goal), flush=True)


if __name__ == "__main__":
    main()
