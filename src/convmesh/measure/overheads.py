"""What the runtime's own Python takes of the host: for a node of each kind, and for a step.

Found from small networks of one kind of node each, through the runtime itself; their operators' own times are taken
off.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from convmesh.layout import Mesh
from convmesh.measure.clock import wait_for
from convmesh.measure.operators import Repeats, distinct_works, processor_clock, time_works
from convmesh.parallel import parallelize, plan
from convmesh.parallel.lowering.loss import with_loss
from convmesh.plan import Program, Work
from convmesh.system.operators import Overheads

CHANNELS = 8
SHAPE = (2, CHANNELS, 8, 8)
ROUNDS = 3
DEPTHS = (2, 10)
"""Nodes of the two networks whose difference is what a node takes."""

Node = nn.Module | Callable[[Any, Any], Any]
"""A module, or a function of the running tensor and of the network's input."""

KINDS: Mapping[str, Callable[[], Node]] = {
    "conv": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
    "batchnorm": lambda: nn.BatchNorm2d(CHANNELS),
    "relu": nn.ReLU,
    "maxpool": lambda: nn.MaxPool2d(3, 1, 1),
    "linear": lambda: nn.Linear(8, 8),
    "layernorm": lambda: nn.LayerNorm(8),
    "instancenorm": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "convtranspose": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 1),
    "dropout": lambda: nn.Dropout(0.1),
    "identity": nn.Identity,
    "gelu": lambda: lambda x, _: F.gelu(x),
    "add": lambda: lambda x, first: x + first,
    "mul": lambda: lambda x, first: x * first,
    "permute": lambda: lambda x, _: x.permute(0, 1, 3, 2),
    "cat": lambda: lambda x, first: torch.cat([x, first], 1),
}


ALONE = Mesh(data=1)


def measure_sending(overheads: Overheads) -> Overheads:
    """With what a node takes a processor that sums a few numbers over ranks, as batch norm does; needs two ranks.

    Waiting is not counted: it belongs to the transfer.
    """
    split = measure_overheads(torch.device("cpu"), {"batchnorm": KINDS["batchnorm"]}, Mesh(data=2))
    more = statistics.mean(split.kinds["batchnorm"]) - statistics.mean(overheads.kinds["batchnorm"])
    return replace(overheads, seconds_sending=max(0.0, more))


def measure_overheads(
    device: torch.device, kinds: Mapping[str, Callable[[], Node]] = KINDS, mesh: Mesh = ALONE
) -> Overheads:
    """Of all kinds; others are taken to be as these are in the middle. Needs a job of the mesh's ranks."""
    pairs = {name: [_Chain(make, depth, device, mesh) for depth in DEPTHS] for name, make in kinds.items()}
    chains = [chain for pair in pairs.values() for chain in pair]
    gc.collect()
    gc.freeze()  # or collections of what is here anyway would be counted as the runtime's
    for _ in range(ROUNDS):
        for chain in chains:
            chain.measure()
    gc.unfreeze()
    least = 0.0 if device.type == "cpu" else -1.0
    found = {name: _of_node(few, many, least) for name, (few, many) in pairs.items()}
    fixed = statistics.median(few.fixed - DEPTHS[0] * sum(found[name]) for name, (few, _) in pairs.items())
    forward, backward = (statistics.median(times) for times in zip(*found.values(), strict=True))
    return Overheads(forward, backward, max(0.0, fixed), waits_for_loss=device.type == "cuda", kinds=found)


def _of_node(few: _Chain, many: _Chain, least: float) -> tuple[float, float]:
    """Beside a GPU an operator's own time may hold more than the runtime adds, and the rest be negative."""
    nodes = DEPTHS[1] - DEPTHS[0]
    forward, backward = ((b - a) / nodes for a, b in zip(few.extra, many.extra, strict=True))
    return max(least, forward), max(least, backward)


class _Net(nn.Module):
    """So many nodes of one kind after each other; the first layer makes all of them find gradients."""

    def __init__(self, make: Callable[[], Node], depth: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.layers = nn.ModuleList()
        self.calls: list[Any] = []
        for _ in range(depth):
            node = make()
            self.layers.extend([node] if isinstance(node, nn.Module) else [])
            self.calls.append(_alone(node) if isinstance(node, nn.Module) else node)

    def forward(self, x: Any) -> Any:
        first = y = self.first(x)
        for call in self.calls:
            y = call(y, first)
        return y


def _alone(module: nn.Module) -> Callable[[Any, Any], Any]:
    return lambda x, _: module(x)


class _Chain:
    """Where the host's time goes in a step of a network of one kind of node."""

    def __init__(self, make: Callable[[], Node], depth: int, device: torch.device, mesh: Mesh) -> None:
        model = _Net(make, depth).to(device)
        made = plan(model, SHAPE, mesh, "data")
        self._net = parallelize(model, made, loss=F.mse_loss)
        lowered = self._net._running.lowered
        shape = lowered.program.nodes[-1].outputs[0].shape
        self._x = self._net.shard_input(torch.randn(SHAPE, device=device))
        self._target = self._net.shard_target(torch.randn(shape, device=device))
        self._device = device
        self._program: Program = with_loss(lowered, F.mse_loss, shape, torch.float32)
        self._spent: list[tuple[float, float, float]] = []
        self._timings: dict[str, list[float]] = defaultdict(list)

    def measure(self) -> None:
        """One more time; rounds of all networks take turns, so that a machine that warms up favours none."""
        timings, _ = time_works(distinct_works([self._program]), self._device, Repeats(seconds_round=0.001))
        for timing in timings:
            self._timings[timing.call].append(timing.seconds_host or timing.seconds)
        self._spent += [self._step() for _ in range(8)][2:]

    @property
    def extra(self) -> tuple[float, float]:
        """Seconds of the host in forward and in backward that operators do not explain."""
        forward, backward, _ = self._middle
        return forward - self._operators("forward"), backward - self._operators("backward")

    @property
    def fixed(self) -> float:
        """The same of a whole step."""
        return sum(self.extra) + self._middle[2]

    @property
    def _middle(self) -> list[float]:
        return [statistics.median(times) for times in zip(*self._spent, strict=True)]

    def _operators(self, phase: str) -> float:
        works = (step for name, _, step in self._program.steps() if name == phase and isinstance(step, Work))
        return sum(statistics.median(self._timings[work.call]) for work in works if work.call in self._timings)

    def _step(self) -> tuple[float, float, float]:
        """Seconds of forward, of backward, and of what comes before."""
        wait_for(self._device)
        clock = time.perf_counter if self._device.type == "cuda" else processor_clock()
        clocks = [clock()]
        self._net.zero_grad()
        clocks.append(clock())
        loss = self._net(self._x, self._target)
        clocks.append(clock())
        loss.backward()
        clocks.append(clock())
        before, forward, backward = (b - a for a, b in pairwise(clocks))
        return forward, backward, before
