"""What ConvMesh does, in two minutes: volumes, a plan, training on all cores, a killed rank, 64 GPUs.

python examples/demo.py [--folder FOLDER] [--extent VOXELS]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import convmesh as cm
from convmesh import models
from convmesh.data import Order, open_source
from convmesh.train.config_files import load_config
from convmesh.train.planned import system_named

SAMPLES = 16
CORES = len(os.sched_getaffinity(0))
RANKS = max(2, min(CORES, 4))
KILL_AFTER = 7
"""Steps; checkpoints are written every 4."""
CLUSTER = ("--input", "4x512x512x512", "--batch", "16", "--gpus", "64", "--system", "dgx-a100")

console = Console(highlight=False, soft_wrap=True)


class Trained(NamedTuple):
    """What a way to train showed."""

    losses: list[float]
    seconds_step: float
    """Of the fastest step: other work on this machine only ever makes steps longer."""
    bytes_memory: int | None
    """What a process needs for a step by the oracle: weights, gradients, optimiser and activations."""


def convmesh(folder: Path, *args: str, quiet: bool = False) -> subprocess.Popen[str]:
    console.print(f"[bold]$ convmesh {' '.join(args)}[/bold]")
    command, err = [sys.executable, "-m", "convmesh", *args], subprocess.DEVNULL if quiet else None
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=err, cwd=folder)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"demo: a command ended with status {process.returncode}; please report this.")
    return output


def train_plainly(folder: Path, extent: int) -> Trained:
    """The same training as a user writes it with torch, in this process, on all cores."""
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
    whole = cm.plan(net, (config.batch, *source.input.shape), cm.Mesh(), "data")
    return Trained(losses, min(seconds), cm.predict(whole, system_named("auto")).bytes_memory)


def metrics(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def ranks_of(supervisor: int) -> list[int]:
    listed = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text()
    return [int(child) for child in listed.split()]


def train_split(folder: Path) -> Trained:
    """Train on ranks, and kill one of them without warning on the way."""
    run = folder / "run"
    process = convmesh(folder, "train", "demo.toml", "--ranks", str(RANKS), "--run", "run")
    while process.poll() is None and len(metrics(run)) < KILL_AFTER:
        time.sleep(0.05)
    before, ranks = metrics(run), ranks_of(process.pid)
    predicted = json.loads((run / "prediction.json").read_text())  # of all ranks; those that are left get another
    console.print(f"  … {len(before)} steps are done; now: [red]kill -9 {ranks[-1]}[/red], one of its ranks")
    os.kill(ranks[-1], signal.SIGKILL)
    console.print(finish(process))
    seconds = min(line["seconds_step"] for line in before)
    return Trained([line["loss"] for line in metrics(run)], seconds, predicted.get("bytes_memory"))


def show_training(folder: Path, plain: Trained, split: Trained) -> None:
    table = Table("", f"plain torch, {CORES} threads", f"ConvMesh, {RANKS} ranks", show_edge=False)
    for step in (0, 1, len(plain.losses) - 1):
        table.add_row(f"loss of step {step + 1}", f"{plain.losses[step]:.6f}", f"{split.losses[step]:.6f}")
    table.add_row("fastest step", *(f"{1e3 * each.seconds_step:.0f} ms" for each in (plain, split)))
    table.add_row("memory a process, predicted", *(in_mib(each.bytes_memory) for each in (plain, split)))
    table.add_row("after kill -9", "the run is lost", told_recovery(folder))
    console.print(table)
    worst = max(abs(a - b) / abs(b) for a, b in zip(split.losses, plain.losses, strict=True))
    gain = plain.seconds_step / split.seconds_step
    console.print(f"\nEvery loss equals the single process's to {worst:.0e}, also after the kill; {gain:.1f}× as fast.")
    if worst > 1e-3:
        raise SystemExit("demo: the losses differ from the single process's; please report this.")


def in_mib(count: int | None) -> str:
    return "not predicted" if count is None else f"{count / 2**20:.0f} MiB"


def told_recovery(folder: Path) -> str:
    events = json.loads((folder / "run" / "summary.json").read_text())["events"]
    lost = next(event for event in events if event["kind"] == "lost")
    again = next(event for event in events[events.index(lost) :] if event["kind"] == "resumed")
    ranks = f"{again['ranks_after']} rank{'' if again['ranks_after'] == 1 else 's'}"
    return f"{lost['step'] - again['step']} steps lost,\ngoes on with {ranks}"


def show_cluster(folder: Path) -> None:
    """The same network at full size on a cluster that is not here."""
    told = json.loads(finish(convmesh(folder, "plan", "cosmoflow", *CLUSTER, "--json", quiet=True)))
    table = Table("strategy", "mesh", "step", "efficiency", "memory a GPU", show_edge=False)
    for plan in told["plans"][:4]:
        mesh = ", ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
        step, memory = f"{1e3 * plan['seconds_step']:.0f} ms", f"{plan['bytes_memory'] / 2**30:.0f} GiB"
        table.add_row(plan["strategy"], mesh, step, f"{plan['efficiency']:.0%}", memory)
    console.print(table)
    for refused in told["rejected"]:
        if refused["strategy"] == "data":
            console.print(f"Not possible with samples alone: {refused['reason'].removeprefix('data: ')}.")


def heading(number: int, text: str) -> None:
    console.print(f"\n[bold cyan]{number}. {text}[/bold cyan]")


def main(folder: Path, extent: int) -> None:
    began = time.monotonic()
    if (load := os.getloadavg()[0]) > CORES:
        console.print(f"This machine is busy (load {load:.0f} on {CORES} cores): times below say little.")
    shutil.copy(Path(__file__).with_suffix(".toml"), folder / "demo.toml")
    heading(1, f"Make {SAMPLES} volumes of {extent}³ voxels, whose cosmology is to be found")
    finish(
        convmesh(
            folder, "data", "make", "cosmology", "--size", str(extent), "--samples", str(SAMPLES), "--out", "volumes.h5"
        )
    )
    heading(2, f"Train CosmoFlow on them with plain torch: one process, {CORES} threads")
    plain = train_plainly(folder, extent)
    heading(3, f"Train it with every volume cut over {RANKS} ranks, and kill one of them")
    split = train_split(folder)
    show_training(folder, plain, split)
    heading(4, "Ask for a plan: the same network on 512³ volumes, 64 A100, nothing but their data sheet")
    show_cluster(folder)
    console.print(f"\nDone in {time.monotonic() - began:.0f} s. Next: docs/start.md for your own network, "
                  "docs/guides/training.md for your own data.")  # fmt: skip


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
