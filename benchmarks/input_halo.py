"""Should ranks read the halos of their inputs, or send them? The first layer with either, next to the whole step.

python -m benchmarks.input_halo     prints the tables of benchmarks/input_halo.md
"""

from __future__ import annotations

import datetime
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import convmesh as cm
from benchmarks.timing import Step, interleave, machine, table
from convmesh import models
from convmesh.testing import run_ranks

ROUNDS = 9
SIZES = (64, 96)
FILTERS = 16


def measure(size: int, file: str) -> tuple[dict[str, list[float]], float]:
    """Seconds of the rivals on two ranks, and of reading a halo from the page cache."""
    torch.manual_seed(0)
    shape = (1, 1, size, size, size)
    conv = nn.Conv3d(1, FILTERS, 3, padding=1)
    net = cm.parallelize(conv, cm.plan(conv, shape, cm.Mesh(depth=2), "spatial"))
    shard = net.shard_input(torch.randn(shape))
    gradient = torch.ones_like(net(shard))
    framed = torch.randn(1, 1, size // 2 + 2, size, size)

    def sent() -> None:
        net(shard).backward(gradient)

    def read() -> None:
        nn.functional.conv3d(framed, conv.weight, conv.bias, padding=(0, 1, 1)).backward(gradient)

    unet = models.create("unet3d", channels=1, classes=3, filters=FILTERS)
    whole = cm.parallelize(unet, cm.plan(unet, shape, cm.Mesh(depth=2), "spatial"), loss=nn.functional.cross_entropy)
    batch = whole.shard_input(torch.randn(shape)), whole.shard_target(torch.zeros(shape[:1] + shape[2:]).long())

    def step() -> None:
        whole(*batch).backward()

    rivals: dict[str, Step] = {
        "first layer, halo sent": sent,
        "first layer, halo read": read,
        "a whole step of a 3D U-Net": step,
    }
    return interleave(rivals, ROUNDS), _seconds_reading(file, size)


def _seconds_reading(file: str, size: int) -> float:
    """Of one plane of the other rank's slab, by the fastest reader there is."""
    volume = np.memmap(file, dtype=np.float32, mode="r", shape=(size, size, size))
    seconds = []
    for _ in range(20):
        begin = time.perf_counter()
        np.array(volume[size // 2])
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def main() -> int:
    print("# Halos of inputs: sent or read\n")
    today = datetime.datetime.now(datetime.UTC).date()
    print(f"{today}, {machine()}, 2 ranks × 1 thread over Gloo; command: `python -m benchmarks.input_halo`")
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "volume.bin"
            np.random.default_rng(0).random((size,) * 3, dtype=np.float32).tofile(file)
            seconds, reading = run_ranks(2, measure, size, str(file), seconds_timeout=600)[0]
        names = list(seconds)
        saved = statistics.median(s - r for s, r in zip(seconds[names[0]], seconds[names[1]], strict=True))
        share = saved / statistics.median(seconds[names[2]])
        print(f"\n### {size}³ cut along depth, 1 channel, {FILTERS} filters\n\n{table(seconds, names[0])}\n")
        print(f"Reading the halo instead saves {100 * share:.1f} % of the step; ", end="")
        print(f"the plane comes out of the page cache in {1e6 * reading:.0f} µs.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
