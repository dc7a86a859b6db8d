"""Convolutions with cut channels on 2 ranks × 1 thread, compared with one process and with the plain formulation.

python -m benchmarks.channels
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from benchmarks.timing import Step, interleave, machine, table
from convmesh.layout.channels import Algorithm
from convmesh.lowering.channel_cuts import cut_channels
from convmesh.testing import run_ranks

SHAPE, FILTERS = (8, 256, 56, 56), 256


class PlainChannel(torch.autograd.Function):
    """Channel parallelism as ParaDL prices it: all-reduce the partial outputs; all-gather the input's gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        mine = x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()
        ctx.save_for_backward(mine, weight)
        y = F.conv2d(mine, weight, padding=1)
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        args = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
        dx, dw, _ = torch.ops.aten.convolution_backward(dy.contiguous(), x, weight, None, *args)
        parts = [torch.empty_like(dx) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, dx)
        return torch.cat(parts, 1), dw


def plain(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> None:
    torch.autograd.grad(PlainChannel.apply(x, weight), (x, weight), dy)


def single(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> None:
    torch.autograd.grad(F.conv2d(x, weight, padding=1), (x, weight), dy)


def cut(x: cm.Sharded, net: nn.Module, dy: torch.Tensor) -> None:
    y = net(x)
    torch.autograd.grad(y.local, (x.local, *net.parameters()), dy)


def cut_step(mesh: cm.OpenMesh, algorithm: Algorithm, whole: torch.Tensor, cotangent: torch.Tensor) -> Step:
    torch.manual_seed(0)
    net = nn.Conv2d(SHAPE[1], FILTERS, 3, padding=1, bias=False)
    axes = {1: tuple(mesh.mesh.axes)}
    cut_channels(net, SHAPE, mesh, axes, algorithm)
    x = cm.shard(whole.detach(), mesh, axes)
    x = x.like(x.local.contiguous(memory_format=torch.channels_last).requires_grad_())
    dy = cm.shard(cotangent, mesh, axes).local.contiguous(memory_format=torch.channels_last)
    return partial(cut, x, net, dy)


def rivals() -> dict[str, Step]:
    mesh = cm.open_mesh(cm.Mesh(channel=2))
    torch.manual_seed(0)
    whole, cotangent = torch.randn(SHAPE).requires_grad_(), torch.randn(SHAPE[0], FILTERS, *SHAPE[2:])
    weight = (torch.randn(FILTERS, SHAPE[1], 3, 3) / 50).requires_grad_()
    last = torch.channels_last
    x_last, dy_last = whole.detach().to(memory_format=last).requires_grad_(), cotangent.to(memory_format=last)
    weight_last = weight.detach().to(memory_format=last).requires_grad_()
    mine = weight.detach().chunk(2, 1)[dist.get_rank()].contiguous().requires_grad_()

    def on_first(step: Callable[..., None], *args: Any) -> Step:
        return lambda: step(*args) if dist.get_rank() == 0 else None

    return {
        "1 process × 1 thread": on_first(single, whole, weight, cotangent),
        "1 process × 1 thread, channels-last": on_first(single, x_last, weight_last, dy_last),
        "plain: all-reduce y, all-gather dx": partial(plain, whole, mine, cotangent),
        "ConvMesh, stationary-x": cut_step(mesh, "x", whole, cotangent),
        "ConvMesh, stationary-y": cut_step(mesh, "y", whole, cotangent),
    }


def measure() -> dict[str, list[float]]:
    return interleave(rivals(), repeats=11, warmups=1)


def volumes_table() -> str:
    """Elements that a rank sends per step, by the plan, as fractions of |x| = |y|."""
    net = nn.Conv2d(SHAPE[1], FILTERS, 3, padding=1, bias=False)
    sample = torch.empty(SHAPE, device="meta", requires_grad=True)
    size = sample.numel()
    rows = ["| ranks | plain | x | y | w |", "| --- | --- | --- | --- | --- |"]
    for mesh in (cm.Mesh(channel=2), cm.Mesh(channel=2, filter=2), cm.Mesh(channel=4, filter=4)):
        p, axes = mesh.size, tuple(mesh.axes)
        algorithms: tuple[Algorithm, ...] = ("x", "y", "w") if len(axes) > 1 else ("x", "y")
        plans = [cm.plan_channels(net, sample, mesh, {1: axes}, a).layers[""].moved.total / size for a in algorithms]
        shown = [f"{share:.3f}" for share in ((2 + 1) * (p - 1) / p, *plans)]
        rows.append(
            f"| {p} ({'×'.join(str(n) for n in mesh.axes.values())}) | {' | '.join(shown + ['–'] * (4 - len(shown)))} |"
        )
    return "\n".join(rows)


def main() -> None:
    print(f"{datetime.date.today()}, {machine()}, 2 ranks over Gloo; command: `python -m benchmarks.channels`\n")
    print(f"### Conv2d {SHAPE[1]}→{FILTERS} k3 on {SHAPE[2]}×{SHAPE[3]}, batch {SHAPE[0]}, forward and backward\n")
    print(table(run_ranks(2, measure, seconds_timeout=900)[0], "1 process × 1 thread"))
    print("\n### Elements that a rank sends in a step, as shares of |x| = |y|\n")
    print(volumes_table())


if __name__ == "__main__":
    main()
