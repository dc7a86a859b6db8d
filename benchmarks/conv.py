"""One split convolution on 2 ranks × 1 thread, compared with what a user could write or run instead.

python -m benchmarks.conv            prints the tables of benchmarks/conv.md
"""

from __future__ import annotations

import datetime
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import convmesh as cm
from benchmarks.timing import Step, interleave, machine, table
from convmesh.testing import run_ranks

CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


@dataclass(frozen=True)
class Layer:
    title: str
    channels: int
    extents: tuple[int, ...]
    repeats: int

    @property
    def spatial(self) -> int:
        return len(self.extents)


LAYERS = (
    Layer("Conv3d 32→32 k3 on 64³, depth cut", 32, (64, 64, 64), 21),
    Layer("Conv2d 64→64 k3 on 512², height cut", 64, (512, 512), 15),
    Layer("Conv3d 32→32 k3 on 16³, depth cut", 32, (16, 16, 16), 100),
)


class HandWritten(torch.autograd.Function):
    """A careful user's version: rows go to the neighbour and are concatenated; their gradient returns and is added."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        rank = dist.get_rank()
        edge = x[:, :, -1:] if rank == 0 else x[:, :, :1]
        row = _swap(edge.contiguous())
        return torch.cat([x, row] if rank == 0 else [row, x], 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        del ctx
        rank = dist.get_rank()
        row = _swap((grad[:, :, -1:] if rank == 0 else grad[:, :, :1]).contiguous())
        own = (grad[:, :, :-1] if rank == 0 else grad[:, :, 1:]).clone()
        own[:, :, -1:] += row if rank == 0 else 0
        own[:, :, :1] += row if rank == 1 else 0
        return own


def _swap(row: torch.Tensor) -> torch.Tensor:
    other, received = 1 - dist.get_rank(), torch.empty_like(row)
    ops = [dist.P2POp(dist.isend, row, other), dist.P2POp(dist.irecv, received, other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


def hand_written(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> None:
    """Forward and backward of this rank's half."""
    spatial = x.dim() - 2
    low, high = (1, 0) if dist.get_rank() == 0 else (0, 1)
    padded = F.pad(HandWritten.apply(x), [0, 0] * (spatial - 1) + [low, high])
    y = F.conv2d(padded, weight, padding=(0, 1)) if spatial == 2 else F.conv3d(padded, weight, padding=(0, 1, 1))
    _, dw = torch.autograd.grad(y, (x, weight), dy)
    dist.all_reduce(dw)


def single(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> None:
    """Forward and backward of the whole layer in this process."""
    y = F.conv2d(x, weight, padding=1) if x.dim() == 4 else F.conv3d(x, weight, padding=1)
    torch.autograd.grad(y, (x, weight), dy)


def split(x: cm.Sharded, weight: torch.Tensor, dy: torch.Tensor) -> None:
    """Forward and backward of this rank's half, by ConvMesh."""
    y = F.conv2d(x, weight, padding=1) if x.dim() == 4 else F.conv3d(x, weight, padding=1)  # type: ignore[call-overload]
    torch.autograd.grad(y.local, (x.local, weight), dy)


def rivals(layer: Layer) -> dict[str, Step]:
    """Every rival's step on this rank; single-process ones run on rank 0 while rank 1 waits."""
    mesh = cm.open_mesh(cm.Mesh(depth=2) if layer.spatial == 3 else cm.Mesh(height=2))
    torch.manual_seed(0)
    whole, cotangent = torch.randn(2, 1, layer.channels, *layer.extents)
    weight = (torch.randn(layer.channels, layer.channels, *[3] * layer.spatial) / 30).requires_grad_()
    shard = cm.shard(whole, mesh, {2: "depth" if layer.spatial == 3 else "height"})
    mine = cotangent[shard.box.slices()].clone()
    # Gradients reach a layer in the format of its output, and ConvMesh's outputs are channels-last.
    mine_last = mine.to(memory_format=CHANNELS_LAST[layer.spatial])
    shard_last = shard.like(shard.local.to(memory_format=CHANNELS_LAST[layer.spatial]).requires_grad_())
    x, local = whole.requires_grad_(), shard.local.requires_grad_()
    last = CHANNELS_LAST[layer.spatial]
    x_last, dy_last = x.detach().to(memory_format=last).requires_grad_(), cotangent.to(memory_format=last)
    weight_last = weight.detach().to(memory_format=last).requires_grad_()

    def on_first(threads: int, step: Step) -> Step:
        return lambda: _with_threads(threads, step) if dist.get_rank() == 0 else None

    return {
        "1 process × 1 thread": on_first(1, partial(single, x, weight, cotangent)),
        "1 process × 1 thread, channels-last": on_first(1, partial(single, x_last, weight_last, dy_last)),
        "1 process × 2 threads": on_first(2, partial(single, x, weight, cotangent)),
        "1 process × 2 threads, channels-last": on_first(2, partial(single, x_last, weight_last, dy_last)),
        "hand-written, 2 ranks × 1 thread": partial(hand_written, local, weight, mine),
        "ConvMesh, 2 ranks × 1 thread": partial(split, shard, weight, mine_last),
        "ConvMesh, 2 ranks × 1 thread, channels-last": partial(split, shard_last, weight_last, mine_last),
    }


def _with_threads(threads: int, step: Step) -> None:
    torch.set_num_threads(threads)
    step()
    torch.set_num_threads(1)


def measure(layer: Layer) -> dict[str, list[float]]:
    return interleave(rivals(layer), layer.repeats)


def main() -> None:
    print(f"{datetime.date.today()}, {machine()}, 2 ranks over Gloo; command: `python -m benchmarks.conv`\n")
    chosen = [LAYERS[int(i)] for i in sys.argv[1:]] or LAYERS
    for layer in chosen:
        seconds = run_ranks(2, measure, layer, seconds_timeout=600)[0]
        print(f"### {layer.title}\n\n{table(seconds, '1 process × 1 thread')}\n", flush=True)


if __name__ == "__main__":
    main()
