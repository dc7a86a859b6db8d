"""A whole 3D U-Net on 2 ranks × 1 thread, split in space, compared with plain torch in one process.

python -m benchmarks.unet            prints the tables of benchmarks/unet.md
"""

from __future__ import annotations

import datetime
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from benchmarks.timing import Step, interleave, machine, table
from convmesh.testing import run_ranks

EXTENT, BASE_CHANNELS, NORM_GROUPS, REPEATS = 64, 8, 4, 11
LAST = torch.channels_last_3d

Norm = Callable[[int], nn.Module]
NORMS: dict[str, Norm] = {"no norm": lambda _: nn.Identity(), "group norm": partial(nn.GroupNorm, NORM_GROUPS)}


def block(channels_in: int, channels: int, norm: Norm) -> nn.Sequential:
    """Two convolutions of one level."""
    layers: list[nn.Module] = []
    for source in (channels_in, channels):
        layers += [nn.Conv3d(source, channels, 3, padding=1), norm(channels), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Two poolings down, two transposed convolutions up, skips joined by concatenation, a pointwise head."""

    def __init__(self, norm: Norm, base: int = BASE_CHANNELS) -> None:
        super().__init__()
        top, middle, bottom = base, 2 * base, 4 * base
        self.down1, self.down2 = block(1, top, norm), block(top, middle, norm)
        self.bottom = block(middle, bottom, norm)
        self.rise2, self.rise1 = nn.ConvTranspose3d(bottom, middle, 2, 2), nn.ConvTranspose3d(middle, top, 2, 2)
        self.up2, self.up1 = block(bottom, middle, norm), block(middle, top, norm)
        self.head = nn.Conv3d(top, 1, 1)

    def forward(self, x: Any) -> Any:
        first = self.down1(x)
        second = self.down2(F.max_pool3d(first, 2))
        y = self.rise2(self.bottom(F.max_pool3d(second, 2)))
        y = self.rise1(self.up2(torch.cat([second, y], 1)))
        return self.head(self.up1(torch.cat([first, y], 1)))


def single(net: UNet, x: torch.Tensor, target: torch.Tensor) -> None:
    """Forward and backward of the whole network in this process."""
    net.zero_grad()
    F.mse_loss(net(x), target).backward()


def split(net: nn.Module, x: torch.Tensor, target: torch.Tensor) -> None:
    """Forward and backward of this rank's half, by ConvMesh, until every rank has the summed gradients."""
    net.zero_grad()
    net(x, target).backward()


def rivals(norm: str) -> dict[str, Step]:
    """Every rival's step on this rank; single-process ones run on rank 0 while rank 1 waits."""
    torch.manual_seed(0)
    x, target = torch.randn(2, 1, 1, EXTENT, EXTENT, EXTENT)
    net, net_last, net_split = (UNet(NORMS[norm]) for _ in range(3))
    plan = cm.plan(net_split, x, cm.Mesh(depth=2), "spatial")
    ours = cm.parallelize(net_split, plan, loss=F.mse_loss)
    net_last.to(memory_format=LAST)  # type: ignore[call-overload]
    last = partial(single, net_last, x.to(memory_format=LAST), target.to(memory_format=LAST))
    plain = partial(single, net, x, target)
    return {
        "1 process × 1 thread": _on_first(1, plain),
        "1 process × 1 thread, channels-last": _on_first(1, last),
        "1 process × 2 threads": _on_first(2, plain),
        "1 process × 2 threads, channels-last": _on_first(2, last),
        "ConvMesh, 2 ranks × 1 thread": partial(split, ours, ours.shard_input(x), ours.shard_target(target)),
    }


def _on_first(threads: int, step: Step) -> Step:
    return lambda: _with_threads(threads, step) if dist.get_rank() == 0 else None


def _with_threads(threads: int, step: Step) -> None:
    torch.set_num_threads(threads)
    step()
    torch.set_num_threads(1)


def measure(norm: str) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Wall-clock seconds of every step, and the median of this process's CPU seconds."""
    spent: dict[str, list[float]] = {}
    steps = {name: _counted(step, spent.setdefault(name, [])) for name, step in rivals(norm).items()}
    return interleave(steps, REPEATS), {name: statistics.median(times) for name, times in spent.items()}


def _counted(step: Step, spent: list[float]) -> Step:
    def counted() -> None:
        begin = time.process_time()
        step()
        spent.append(time.process_time() - begin)

    return counted


def processor_table(ranks: list[dict[str, float]]) -> str:
    """CPU time of each rank, which other work on the machine hardly changes."""
    rows = ["| rival | processor ms, rank 0 | rank 1 |", "| --- | --- | --- |"]
    return "\n".join(
        [*rows, *(f"| {name} | {' | '.join(f'{1e3 * r[name]:.0f}' for r in ranks)} |" for name in ranks[0])]
    )


def main() -> None:
    print(f"{datetime.date.today()}, {machine()}, 2 ranks over Gloo; command: `python -m benchmarks.unet`\n")
    for norm in sys.argv[1:] or NORMS:
        by_rank = run_ranks(2, measure, norm, seconds_timeout=600)
        print(f"### {norm.capitalize()}\n\n{table(by_rank[0][0], '1 process × 1 thread')}\n")
        print(f"{processor_table([spent for _, spent in by_rank])}\n", flush=True)


if __name__ == "__main__":
    main()
