"""What a split operator costs in Python: time of a call on a shard, less that of torch's operator on a plain tensor.

python -m benchmarks.call_cost     prints the table of benchmarks/call_cost.md

Tensors are tiny, and nothing is sent: one rank of two is enough, without the other. CPU time of the process, in
microseconds; the least of interleaved rounds.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.timing import machine
from convmesh.dist import OpenMesh, StepSettings, dry_mesh
from convmesh.layout import Mesh
from convmesh.ops.core.sharded import shard

ROUNDS, CALLS = 15, 200
MESHES: list[tuple[str, tuple[dict[str, int], dict[int, str]]]] = [
    ("samples cut", ({"data": 2}, {0: "data"})),
    ("nothing cut", ({}, {})),
]

_weight, _square, _norm = torch.randn(8, 8, 3, 3), torch.randn(8, 8), torch.ones(8)
CALLED: dict[str, Callable[[Any], Any]] = {
    "conv2d": lambda x: F.conv2d(x, _weight, _norm, padding=1),
    "relu": F.relu,
    "add": lambda x: x + x,
    "batch_norm (replica)": lambda x: F.batch_norm(x, None, None, _norm, _norm, training=True),
    "cat": lambda x: torch.cat([x, x], 1),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "flatten": lambda x: torch.flatten(x, 1),
    "linear": lambda x: F.linear(x, _square, _norm),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2.0),
    "softmax": lambda x: F.softmax(x, 1),
    "layer_norm": lambda x: F.layer_norm(x, (8,), _norm, _norm),
    "mean": lambda x: x.mean((2, 3)),
}


def microseconds(call: Callable[[Any], Any], x: Any) -> float:
    """CPU time of one call."""
    begin = time.process_time()
    for _ in range(CALLS):
        call(x)
    return (time.process_time() - begin) / CALLS * 1e6


def own_cost(call: Callable[[Any], Any], mesh: OpenMesh, cut: Any) -> tuple[float, float]:
    """Of torch's operator, and what a call on a shard takes on top."""
    x = shard(torch.randn(4, 8, 8, 8), mesh, cut)
    x.requires_grad_()
    plain = x.local
    call(x)
    rounds = [(microseconds(call, plain), microseconds(call, x)) for _ in range(ROUNDS)]
    least = [min(each) for each in zip(*rounds, strict=True)]
    return least[0], least[1] - least[0]


def table() -> list[str]:
    """A row for each operator."""
    settings = StepSettings(replica_statistics=True, sums_weights=False)
    opened = {name: (dry_mesh(Mesh(**axes), 0, "cpu").with_settings(settings), cut) for name, (axes, cut) in MESHES}
    lines = [f"| operator | torch | {' | '.join(opened)} |", "| --- | ---: | ---: | ---: |"]
    for name, call in CALLED.items():
        found = [own_cost(call, *where) for where in opened.values()]
        lines.append(f"| `{name}` | {found[0][0]:.1f} | {' | '.join(f'{own:.1f}' for _, own in found)} |")
    return lines


def main() -> None:
    torch.set_num_threads(1)
    print(f"{datetime.date.today()}, {machine()}, 1 thread; command: `python -m benchmarks.call_cost`\n")
    print("\n".join(table()))


if __name__ == "__main__":
    main()
