"""Published networks with large layers: a step on 2 ranks × 1 thread, cut in space, against 1 process × 1 thread.

python -m benchmarks.networks.speed > benchmarks/networks_speed.md      on a machine that does nothing else
"""

from __future__ import annotations

import datetime
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
from convmesh.runtime import ParallelNet
from convmesh.testing import run_ranks

LARGE: dict[str, Shape] = {
    "torchvision.resnet18": (2, 3, 384, 384), "torchvision.resnet50": (2, 3, 256, 256),
    "torchvision.vgg11_bn": (2, 3, 256, 256), "torchvision.densenet121": (2, 3, 256, 256),
    "torchvision.mobilenet_v2": (2, 3, 384, 384), "torchvision.convnext_tiny": (2, 3, 256, 256),
    "torchvision.swin_t": (2, 3, 256, 256), "torchvision.fcn_resnet50": (2, 3, 256, 256),
    "torchvision.r3d_18": (2, 3, 8, 112, 112), "timm.convnextv2_atto": (2, 3, 384, 384),
    "timm.hrnet_w18_small": (2, 3, 256, 256), "smp.Unet": (2, 3, 256, 256), "smp.FPN": (2, 3, 256, 256),
    "monai.UNet": (1, 1, 96, 96, 96), "monai.SegResNet": (1, 1, 96, 96, 96), "monai.VNet": (1, 1, 64, 64, 64),
    "nnunet.PlainConvUNet": (1, 1, 96, 96, 96), "nnunet.ResidualEncoderUNet": (1, 1, 96, 96, 96),
}  # fmt: skip
"""Inputs of which every rank's half still keeps a core busy in the first layers."""

ONE, TWO, REPEATS = "1 process × 1 thread", "2 ranks × 1 thread", 5


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
    whole = partial(_step, model, x)
    return interleave({ONE: lambda: whole() if dist.get_rank() == 0 else None, TWO: _split_step(split, x)}, REPEATS)


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
    one, two = (statistics.median(seconds[rival]) for rival in (ONE, TWO))
    ratio = statistics.median(a / b for a, b in zip(seconds[ONE], seconds[TWO], strict=True))
    shape = "×".join(map(str, network.shape))
    return f"| {network.name} | {shape} | {1e3 * one:.0f} | {1e3 * two:.0f} | {ratio:.2f}× |"


HEAD = f"""# Published networks, cut in space over two processors

One step, forward and backward, in float32: {TWO} under `spatial`, against {ONE}; medians of
{REPEATS} rounds in which both take turns. Above 1×, two ranks are faster.

{{today}}; {{machine}}; `python -m benchmarks.networks.speed`

| network | input | {ONE}, ms | {TWO}, ms | ratio |
| --- | --- | --: | --: | --: |"""


if __name__ == "__main__":
    main()
