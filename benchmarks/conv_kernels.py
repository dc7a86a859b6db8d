"""Which local convolution kernel is fastest on this CPU, one thread: the evidence behind `convmesh.kernels.local_conv`.

python -m benchmarks.conv_kernels
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.timing import machine
from convmesh.kernels.conv_params import ConvParams
from convmesh.kernels.local_conv import convolution, convolution_backward

SHARDS = [
    (8, 8, (32, 64, 64)),
    (16, 16, (16, 32, 32)),
    (32, 32, (8, 16, 16)),
    (32, 32, (32, 64, 64)),
    (64, 64, (256, 512)),
]


def milliseconds(step: Callable[[], object], repeats: int = 7) -> float:
    step()
    spent = []
    for _ in range(repeats):
        begin = time.perf_counter()
        step()
        spent.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(spent)


def row(channels: int, filters: int, extents: tuple[int, ...]) -> str:
    dims = len(extents)
    x, dy = torch.randn(1, channels, *extents), torch.randn(1, filters, *extents)
    weight = torch.randn(filters, channels, *[3] * dims) / 30
    params = ConvParams((1,) * dims, (1,) * dims, (1,) * dims, 1)
    args = ([1] * dims, [1] * dims, [1] * dims, False, [0] * dims, 1)

    def plain() -> None:
        torch.ops.aten.convolution(x, weight, None, *args)
        torch.ops.aten.convolution_backward(dy, x, weight, None, *args, [True, True, False])

    def chosen() -> None:
        convolution(x, weight, None, params, "cpu")
        convolution_backward(dy, x, weight, params, (True, True), "cpu")

    aten, ours = milliseconds(plain), milliseconds(chosen)
    size = "×".join(str(n) for n in extents)
    return f"| {channels}→{filters} on {size} | {aten:.1f} | {ours:.1f} | {aten / ours:.1f}× |"


def main() -> None:
    torch.set_num_threads(1)
    print(f"{datetime.date.today()}, {machine()}, 1 thread; command: `python -m benchmarks.conv_kernels`\n")
    print("Forward and both gradients, k3, batch 1, float32, plain contiguous input; conversions included.\n")
    print("| layer | ATen ms | ConvMesh kernel ms | ratio |\n| --- | --- | --- | --- |")
    for channels, filters, extents in SHARDS:
        print(row(channels, filters, extents), flush=True)


if __name__ == "__main__":
    main()
