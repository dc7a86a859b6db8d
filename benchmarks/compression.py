"""Compressed gradients over a slow link: step time, bytes and test accuracy of the digits example on two hosts.

python -m benchmarks.compression time [--latency-ms N] [--only NAME]   as root: two hosts, one link of 100 Mbit/s
python -m benchmarks.compression accuracy [--seeds N]                  two local ranks; no link is needed for that
Both print a table of benchmarks/compression.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from tests.cluster.cluster import Cluster
from tests.cluster.line import Link

import convmesh as cm
from benchmarks.timing import machine
from convmesh.lowering import lower_plan
from convmesh.plans.summing import Compression

ROOT = Path(__file__).parents[1]
MEGABITS_PER_SECOND = 100.0
EPOCHS_TIMED = 6
SIDE, BATCH = 32, 64
NAMES: tuple[Compression, ...] = get_args(Compression)
EXAMPLE = [
    "examples/digits.toml", "--precision", "fp32", "--plan.no-predict", "--checkpoint.every-epochs", "0",
    "--evaluation.every-epochs", "0",
]  # fmt: skip


def command(compression: str, folder: Path, *options: str) -> list[str]:
    chosen = ["--plan.compression", compression, "--run", str(folder / "run")]
    return [sys.executable, "-m", "convmesh", "train", *EXAMPLE, *chosen, *options]


def bytes_sent(compression: Compression) -> int:
    """Of gradients, by each of two ranks in a step, as the program says and a test checks."""
    model = cm.models.create("lenet5")
    plan = cm.plan(model, (BATCH, 1, SIDE, SIDE), cm.Mesh(data=2), "data", compression=compression)
    return sum(transfer.bytes_sent for transfer in lower_plan(plan).program.reduction)


def seconds_over_link(compression: str, seconds_latency: float) -> list[float]:
    """Of steps on two hosts; half of the latency is on each one's link."""
    link = Link(MEGABITS_PER_SECOND, seconds_latency / 2)
    with tempfile.TemporaryDirectory() as folder, Cluster(2, link) as cluster:
        place = ["--ranks", "1", "--hosts", "2", "--rendezvous", f"{cluster.hosts[0].address}:29400"]
        call = command(compression, Path(folder), *place, "--epochs", str(EPOCHS_TIMED))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = [host.start(call, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) for host in cluster.hosts]
        if codes := [code for process in started if (code := process.wait())]:
            raise SystemExit(f"{compression}: supervisors ended with {codes}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["seconds_step"] for line in lines]


def accuracy(compression: str, seed: int) -> float:
    """Of the test set after the whole example."""
    with tempfile.TemporaryDirectory() as folder:
        call = command(compression, Path(folder), "--ranks", "2", "--seed", str(seed))
        subprocess.run(call, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        summary: dict[str, Any] = json.loads((Path(folder) / "run" / "summary.json").read_text())
    return float(summary["eval"]["accuracy"])


def show_times(names: Sequence[Compression], seconds_latency: float) -> None:
    print(
        "| compression | gradient bytes a rank sends in a step | step, ms | quartiles, ms |\n| --- | --- | --- | --- |"
    )
    for name in names:
        low, middle, high = (1e3 * q for q in statistics.quantiles(seconds_over_link(name, seconds_latency), n=4))
        print(f"| {name} | {bytes_sent(name):,} | {middle:.1f} | {low:.1f} to {high:.1f} |", flush=True)


def show_accuracies(names: Sequence[Compression], seeds: int) -> None:
    print(f"| compression | mean | {' | '.join(f'seed {seed}' for seed in range(seeds))} |")
    print("| --- " * (seeds + 2) + "|")
    for name in names:
        found = [accuracy(name, seed) for seed in range(seeds)]
        print(f"| {name} | {statistics.mean(found):.2%} | {' | '.join(f'{x:.2%}' for x in found)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("time", "accuracy"))
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=NAMES)
    given = parser.parse_args()
    names = (given.only,) if given.only else NAMES
    print(
        f"{datetime.date.today()}, {machine()}; command: `python -m benchmarks.compression {' '.join(sys.argv[1:])}`\n"
    )
    if given.what == "time":
        show_times(names, given.latency_ms / 1e3)
    else:
        show_accuracies(names, given.seeds)


if __name__ == "__main__":
    main()
