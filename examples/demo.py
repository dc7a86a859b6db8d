"""What ConvMesh does, in two minutes: volumes, a plan, training on all cores, a killed rank, 64 GPUs.

python examples/demo.py [--folder FOLDER] [--extent VOXELS]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from convmesh import models
from convmesh.data import Order, open_source
from convmesh.train.config_files import load_config

SAMPLES = 16
CORES = len(os.sched_getaffinity(0))
RANKS = max(2, min(CORES, 4))
KILL_AFTER = 7
"""Steps; checkpoints are written every 4."""

console = Console(highlight=False)


def convmesh(*args: str, show: bool = True) -> subprocess.Popen[str]:
    if show:
        console.print(f"\n[bold]$ convmesh {' '.join(args)}[/bold]")
    return subprocess.Popen([sys.executable, "-m", "convmesh", *args], text=True, stdout=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"demo: a command ended with status {process.returncode}; please report this.")
    return output


def train_plainly(folder: Path, extent: int) -> tuple[list[float], float]:
    """The same training as a user writes it with torch, in this process, on all cores: losses, seconds per step."""
    config = load_config(folder / "demo.toml")
    source = open_source(folder / "volumes.h5")
    order = Order(config.seed, len(source), config.batch)
    torch.manual_seed(config.seed)
    net = models.create(config.model.name, extent=extent, **config.model.args)
    optimizer = torch.optim.SGD(net.parameters(), lr=config.optimizer.lr, momentum=config.optimizer.momentum)
    losses, seconds = [], []
    for step in range(config.steps):
        batch = order.batch(*divmod(step, order.batches))
        x = torch.from_numpy(np.stack([source.read(index) for index in batch]))
        target = torch.from_numpy(np.stack([source.read_target(index) for index in batch]))
        begin = time.perf_counter()
        loss = F.mse_loss(net(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return losses, statistics.median(seconds[3:])


def metrics(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def ranks_of(supervisor: int) -> list[int]:
    listed = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text()
    return [int(child) for child in listed.split()]


def kill_a_rank(process: subprocess.Popen[str], run: Path) -> list[dict[str, Any]]:
    """Kill the last rank without warning in the middle of training; the steps until then."""
    while process.poll() is None and len(metrics(run)) < KILL_AFTER:
        time.sleep(0.05)
    before = metrics(run)
    victim = ranks_of(process.pid)[-1]
    console.print(f"  … {len(before)} steps are done; now: [red]kill -9 {victim}[/red], one of its ranks")
    os.kill(victim, signal.SIGKILL)
    return before


def show_training(plain: tuple[list[float], float], before: list[dict[str, Any]], run: Path) -> None:
    losses, seconds_plain = plain
    after = metrics(run)
    seconds = statistics.median(line["seconds_step"] for line in before[3:])
    table = Table("step", "plain torch, 1 process", f"ConvMesh, {RANKS} ranks", title="loss")
    for line in [*after[:3], *after[-3:]]:
        table.add_row(str(line["step"]), f"{losses[line['step'] - 1]:.6f}", f"{line['loss']:.6f}")
    table.add_section()
    table.add_row("ms per step", f"{1e3 * seconds_plain:.0f} ({CORES} threads)", f"{1e3 * seconds:.0f}")
    console.print(table)
    worst = max(abs(line["loss"] - losses[line["step"] - 1]) / losses[line["step"] - 1] for line in after)
    console.print(
        f"Every loss equals the single process's to {worst:.0e}, also after the kill; "
        f"{seconds_plain / seconds:.1f}× as fast."
    )
    if worst > 1e-3:
        raise SystemExit("demo: the losses differ from the single process's; please report this.")


def show_events(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    for event in summary.get("events", []):
        console.print(f"  step {event['step']:>3}: {event['what']}")
    predicted = json.loads((run / "prediction.json").read_text())
    if predicted.get("bytes_memory"):
        console.print(f"  memory a rank: {max_bytes(predicted['bytes_memory']) / 2**20:.0f} MiB predicted")


def max_bytes(value: Any) -> float:
    return max(value) if isinstance(value, list) else float(value)


def show_cluster(folder: Path) -> None:
    """The same network at full size on a cluster that is not here."""
    args = ["plan", "cosmoflow", "--input", "4x128x128x128", "--batch", "64", "--gpus", "64", "--system", "dgx-a100"]
    told = json.loads(finish(convmesh(*args, "--json", "--save", str(folder / "cluster.toml"))))
    table = Table(
        "strategy", "mesh", "ms per step", "efficiency", "GiB a GPU", title="CosmoFlow 128³ on 64 A100, predicted"
    )
    for plan in told["plans"][:4]:
        mesh = ", ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
        step, memory = 1e3 * plan["seconds_step"], max_bytes(plan["bytes_memory"]) / 2**30
        table.add_row(plan["strategy"], mesh, f"{step:.1f}", f"{plan['efficiency']:.0%}", f"{memory:.1f}")
    console.print(table)


def main(folder: Path, extent: int) -> None:
    began = time.monotonic()
    shutil.copy(Path(__file__).with_suffix(".toml"), folder / "demo.toml")
    volumes, run = folder / "volumes.h5", folder / "run"
    args = ("--size", str(extent), "--samples", str(SAMPLES), "--out", str(volumes))
    finish(convmesh("data", "make", "cosmology", *args))
    console.print(f"\nTraining CosmoFlow on {extent}³ volumes with plain torch, one process, {CORES} threads …")
    plain = train_plainly(folder, extent)
    process = convmesh("train", str(folder / "demo.toml"), "--ranks", str(RANKS), "--run", str(run))
    before = kill_a_rank(process, run)
    console.print(finish(process))
    show_events(run)
    show_training(plain, before, run)
    show_cluster(folder)
    console.print(f"\nDone in {time.monotonic() - began:.0f} s. Next: docs/start.md")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where volumes and the run go; by default a temporary folder")
    parser.add_argument("--extent", type=int, default=64, help="voxels along each side of a volume")
    chosen = parser.parse_args()
    if chosen.folder is not None:
        chosen.folder.mkdir(parents=True, exist_ok=True)
        main(chosen.folder, chosen.extent)
    else:
        with tempfile.TemporaryDirectory(prefix="convmesh-demo-") as temporary:
            main(Path(temporary), chosen.extent)
