"""A 3D U-Net learns to find balls in noise: on one process, then split over 2 and over 4 ranks.

The network is ordinary PyTorch and the same in all three runs; only its input is sharded. The losses must agree.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import convmesh as cm
from convmesh.ops import dice_loss
from convmesh.testing import run_ranks

EXTENT, STEPS = 48, 6
MESHES = {"2 ranks, depth halved": cm.Mesh(depth=2), "4 ranks, depth and height halved": cm.Mesh(depth=2, height=2)}


class UNet(nn.Module):
    """Two levels, batch norm, max pooling down, transposed convolution up, a skip connection."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = self._block(1, width)
        self.bottom = self._block(width, 2 * width)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.merge = self._block(2 * width, width)
        self.head = nn.Conv3d(width, 2, 1)

    @staticmethod
    def _block(channels: int, filters: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv3d(channels, filters, 3, padding=1), nn.BatchNorm3d(filters), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.down(x)
        coarse = self.bottom(F.max_pool3d(fine, 2))
        return self.head(self.merge(torch.cat([fine, self.up(coarse)], 1)))  # type: ignore[no-any-return]


def volumes() -> tuple[torch.Tensor, torch.Tensor]:
    """Two noisy volumes with a ball each, and the masks of the balls."""
    line = torch.linspace(-1, 1, EXTENT)
    grid = torch.stack(torch.meshgrid(line, line, line, indexing="ij"))
    centres, radii = torch.tensor([[0.1, -0.2, 0.3], [-0.3, 0.2, 0.0]]), torch.tensor([0.5, 0.4])
    masks = torch.stack([((grid - c.view(3, 1, 1, 1)).norm(dim=0) < r) for c, r in zip(centres, radii, strict=True)])
    noise = torch.randn(masks.shape, generator=torch.Generator().manual_seed(1))
    return (masks.float() + noise).unsqueeze(1), masks.long()


def train(mesh: cm.Mesh | None) -> tuple[list[float], float, int]:
    """Losses, median seconds of a step and bytes that this rank sent per step."""
    torch.manual_seed(0)
    net, (x, target) = UNet(), volumes()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    opened = cm.open_mesh(mesh) if mesh else None
    if opened:
        x = cm.shard(x, opened, {2: "depth", 3: "height"})  # type: ignore[assignment]
        target = cm.shard(target, opened, {1: "depth", 2: "height"})  # type: ignore[assignment]
    losses, seconds = [], []
    for _ in range(STEPS):
        begin = time.perf_counter()
        logits = net(x)
        loss = F.cross_entropy(logits, target) + dice_loss(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return losses, statistics.median(seconds), opened.traffic.bytes_total // STEPS if opened else 0


def main() -> None:
    console = Console()
    console.print(f"Training a 3D U-Net on {EXTENT}³ volumes, {STEPS} steps, three times …")
    runs = {"1 process": run_ranks(1, train, None)[0]}
    runs |= {name: run_ranks(mesh.size, train, mesh)[0] for name, mesh in MESHES.items()}
    table = Table("step", *runs, title="loss (cross-entropy + Dice)")
    for step in range(STEPS):
        table.add_row(str(step + 1), *(f"{losses[step]:.7f}" for losses, _, _ in runs.values()))
    table.add_section()
    table.add_row("ms a step", *(f"{1e3 * seconds:.0f}" for _, seconds, _ in runs.values()))
    table.add_row("sent a step", *(f"{sent / 1024:.0f} KiB a rank" for _, _, sent in runs.values()))
    console.print(table)
    single = runs["1 process"][0]
    worst = max(abs(a - b) / b for losses, _, _ in runs.values() for a, b in zip(losses, single, strict=True))
    console.print(f"Largest relative difference from the single process: {worst:.1e}")
    if worst > 1e-4:
        raise SystemExit("demo: the split runs differ from the single process; please report this.")


if __name__ == "__main__":
    main()
