"""Published networks with large layers: a step on 2 ranks × 1 thread, cut in space, against 1 process × 1 thread.

Also with threads as the system schedules them by default, which ranks change (convmesh/dist/thread_policy.py).

python -m benchmarks.networks.speed > benchmarks/networks_speed.md      on a machine that does nothing else
"""

from __future__ import annotations

import datetime
import os
import statistics
import sys
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import convmesh as cm
from benchmarks.networks.factories import Published, Shape, import_package
from benchmarks.networks.published import published
from benchmarks.networks.surveying import tensors_of, without_chance
from benchmarks.timing import Step, interleave, machine
from convmesh.dist.thread_policy import move_threads
from convmesh.runtime import ParallelNet
from convmesh.testing import run_ranks

SQUARE = (1, 3, 640, 640)
LARGE: dict[str, Shape] = {
    "torchvision.resnet18": SQUARE, "torchvision.resnet50": SQUARE,
    "torchvision.vgg11_bn": SQUARE, "torchvision.densenet121": SQUARE,
    "torchvision.mobilenet_v2": SQUARE, "torchvision.convnext_tiny": SQUARE,
    "torchvision.swin_t": SQUARE, "torchvision.fcn_resnet50": SQUARE,
    "torchvision.r3d_18": (2, 3, 8, 112, 112), "timm.convnextv2_atto": SQUARE,
    "timm.hrnet_w18_small": SQUARE, "smp.Unet": SQUARE, "smp.FPN": SQUARE,
    "monai.UNet": (1, 1, 96, 96, 96), "monai.SegResNet": (1, 1, 96, 96, 96), "monai.VNet": (1, 1, 64, 64, 64),
    "nnunet.PlainConvUNet": (1, 1, 96, 96, 96), "nnunet.ResidualEncoderUNet": (1, 1, 96, 96, 96),
}  # fmt: skip
"""Inputs of which every rank's half still keeps a core busy in the first layers."""

ONE, TWO, USUAL, REPEATS = "1 process × 1 thread", "2 ranks × 1 thread", "2 ranks, threads as usual", 3


def main() -> None:
    names = sys.argv[1:] or [*LARGE]
    networks = [replace(published()[name], shape=LARGE[name]) for name in names]
    print(HEAD.format(today=datetime.date.today(), machine=machine()))
    for network in networks:
        import_package(network.package)
        print(_row(network, run_ranks(2, _measured, network, seconds_timeout=1200)[0]), flush=True)


def _measured(network: Published) -> dict[str, list[float]]:
    """On one rank: seconds of both steps, which take turns; the single process is the first rank while others wait."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, x = without_chance(network.model()).float(), network.batch().float()
    split = cm.parallelize(
        twin := without_chance(network.model()).float(), cm.plan(twin, x, cm.Mesh(height=2), "spatial")
    )
    whole, both = partial(_step, model, x), _split_step(split, x)

    def as_usual() -> None:
        move_threads(os.SCHED_BATCH, os.SCHED_OTHER)
        both()
        move_threads(os.SCHED_OTHER, os.SCHED_BATCH)

    return interleave({ONE: lambda: whole() if dist.get_rank() == 0 else None, USUAL: as_usual, TWO: both}, REPEATS)


def _step(model: nn.Module, x: Any) -> None:
    model.zero_grad()
    _backward(tensors_of(model(x)))


def _split_step(net: ParallelNet, x: torch.Tensor) -> Step:
    part = net.shard_input(x)

    def step() -> None:
        net.zero_grad()
        _backward([y.local if hasattr(y, "local") else y for y in tensors_of(net(part))])

    return step


def _backward(outputs: Iterable[torch.Tensor]) -> None:
    learning = [y for y in outputs if y.requires_grad]
    torch.autograd.backward(learning, [torch.ones_like(y) for y in learning])


def _row(network: Published, seconds: dict[str, list[float]]) -> str:
    one, usual, two = (f"{1e3 * statistics.median(seconds[rival]):.0f}" for rival in (ONE, USUAL, TWO))
    ratio = statistics.median(a / b for a, b in zip(seconds[ONE], seconds[TWO], strict=True))
    shape = "×".join(map(str, network.shape))
    return f"| {network.name} | {shape} | {one} | {usual} | {two} | {ratio:.2f}× |"


HEAD = f"""# Published networks, cut in space over two processors

One step, forward and backward, in float32: {TWO} under `spatial`, against {ONE}; medians of
{REPEATS} rounds in which all take turns. Above 1×, two ranks are faster. *As usual*: with threads that the system
schedules by its default, which lets Gloo's threads take the cores of those that compute; ranks change that.

{{today}}; {{machine}}; `python -m benchmarks.networks.speed`

| network | input | {ONE}, ms | {USUAL}, ms | {TWO}, ms | ratio |
| --- | --- | --: | --: | --: | --: |"""


if __name__ == "__main__":
    main()
