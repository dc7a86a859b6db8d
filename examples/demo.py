"""A 3D U-Net learns to find balls in noise: on one process, then on 4 ranks under two different plans.

The network is ordinary PyTorch and the same in all runs. The losses must agree.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import convmesh as cm
from convmesh import models
from convmesh.testing import run_ranks

EXTENT, STEPS = 32, 6
PLANS = {
    "4 ranks: depth and height halved": (cm.Mesh(depth=2, height=2), "spatial"),
    "4 ranks: samples and filters halved": (cm.Mesh(data=2, filter=2), "data+filter"),
}


@dataclass(frozen=True)
class Run:
    """Losses, median seconds per step, and bytes that the first rank sends per step."""

    losses: list[float]
    seconds_step: float
    bytes_sent: int = 0


def volumes() -> tuple[torch.Tensor, torch.Tensor]:
    """Two noisy volumes with a ball each, and the masks of the balls."""
    line = torch.linspace(-1, 1, EXTENT)
    grid = torch.stack(torch.meshgrid(line, line, line, indexing="ij"))
    centres, radii = torch.tensor([[0.1, -0.2, 0.3], [-0.3, 0.2, 0.0]]), torch.tensor([0.5, 0.4])
    masks = torch.stack([((grid - c.view(3, 1, 1, 1)).norm(dim=0) < r) for c, r in zip(centres, radii, strict=True)])
    noise = torch.randn(masks.shape, generator=torch.Generator().manual_seed(1))
    return (masks.float() + noise).unsqueeze(1), masks.long()


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return models.create("unet3d", classes=2, filters=8, levels=3, norm="batch")


def train_whole() -> Run:
    """Train in one process with plain torch."""
    net, (x, target) = network(), volumes()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    losses, seconds = [], []
    for _ in range(STEPS):
        begin = time.perf_counter()
        loss = F.cross_entropy(net(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return Run(losses, statistics.median(seconds))


def train_split(mesh: cm.Mesh, strategy: str) -> Run:
    """Train on this rank of a mesh: the same network and the same loop."""
    model, (x, target) = network(), volumes()
    net = cm.parallelize(model, cm.plan(model, x, mesh, strategy), loss=F.cross_entropy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    x, target = net.shard_input(x), net.shard_target(target)
    losses, seconds = [], []
    for _ in range(STEPS):
        begin = time.perf_counter()
        loss = net(x, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return Run(losses, statistics.median(seconds), net.program.bytes_sent.total())


def main() -> None:
    console = Console()
    console.print(f"Training a 3D U-Net on two {EXTENT}³ volumes, {STEPS} steps, three times …")
    runs = {"1 process": run_ranks(1, train_whole)[0]}
    runs |= {name: run_ranks(mesh.size, train_split, mesh, strategy)[0] for name, (mesh, strategy) in PLANS.items()}
    table = Table("step", *runs, title="loss")
    for step in range(STEPS):
        table.add_row(str(step + 1), *(f"{run.losses[step]:.7f}" for run in runs.values()))
    table.add_section()
    table.add_row("ms per step", *(f"{1e3 * run.seconds_step:.0f}" for run in runs.values()))
    table.add_row("sent per step", *(f"{run.bytes_sent / 1024:.0f} KiB per rank" for run in runs.values()))
    console.print(table)
    single = runs["1 process"].losses
    worst = max(abs(a - b) / b for run in runs.values() for a, b in zip(run.losses, single, strict=True))
    console.print(f"Largest relative difference from the single process: {worst:.1e}")
    if worst > 1e-4:
        raise SystemExit("demo: the split runs differ from the single process; please report this.")


if __name__ == "__main__":
    main()
