"""Sums of gradients over hosts in two levels, in segments of several sizes, and in one ring.

python -m benchmarks.segments [--megabits N] [--milliseconds N] [--repeats N]   as root: two hosts of two ranks each

While a segment crosses the link between hosts, others are summed and gathered inside them. Prints a table of
benchmarks/hierarchical.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tests.cluster.line import Link
from torch import nn

import convmesh as cm
from benchmarks.hierarchical import RANKS, RANKS_PER_HOST, on_hosts
from benchmarks.timing import Step, interleave, machine, table
from convmesh.dist import OpenMesh
from convmesh.gradients.hierarchical import HierarchicalReducer
from convmesh.gradients.reduction import GradientReducer

BYTES_WEIGHT = 256 << 10
SEGMENTS = {
    "in one": 1 << 40, "of 4 MiB": 4 << 20, "of 2 MiB": 2 << 20, "of 1 MiB": 1 << 20, "of 512 KiB": 512 << 10,
    "of 256 KiB": 256 << 10,
}  # fmt: skip
"""Of what a rank sends to other hosts, in bytes."""


def backward_of(mesh: OpenMesh, mebibytes: int, bytes_segment: int) -> Step:
    """A backward pass that costs next to nothing, but for the sums of its gradients; in one ring without segments."""
    weights = [nn.Parameter(torch.ones(BYTES_WEIGHT // 4)) for _ in range((mebibytes << 20) // BYTES_WEIGHT)]
    axes_of = [(weight, ("data",)) for weight in weights]
    reducer = (
        GradientReducer(mesh, axes_of)
        if not bytes_segment
        else HierarchicalReducer(mesh, axes_of, RANKS_PER_HOST, bytes_segment)
    )

    def step() -> None:
        for weight in reducer.axes_of:
            weight.grad = None
        torch.stack([weight.sum() for weight in weights]).sum().backward()

    return step


def run_rank(mebibytes: int, repeats: int, answer: Path) -> None:
    """One rank's part; the first writes what was found."""
    torch.set_num_threads(1)
    cm.init()
    mesh = cm.open_mesh(cm.Mesh(data=RANKS))
    sizes = {"one ring": 0} | {f"two levels, {segments}": size for segments, size in SEGMENTS.items()}
    steps = {name: backward_of(mesh, mebibytes, size) for name, size in sizes.items()}
    seconds = interleave(steps, repeats)
    if dist.get_rank() == 0:
        answer.write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabits", type=float, default=1000.0)
    parser.add_argument("--milliseconds", type=float, default=0.0, help="that a packet takes on top")
    parser.add_argument("--mebibytes", type=int, default=16, help="of gradients")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.answer is not None:
        run_rank(given.mebibytes, given.repeats, given.answer)
        return
    print(f"{datetime.date.today()}, {machine()}; `python -m benchmarks.segments {' '.join(sys.argv[1:])}`\n")
    command = ["benchmarks.segments", "--mebibytes", str(given.mebibytes), "--repeats", str(given.repeats)]
    print(table(on_hosts(command, Link(given.megabits, given.milliseconds / 1000)), "one ring"))


if __name__ == "__main__":
    main()
