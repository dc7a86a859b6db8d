"""Measures the host time of the runtime's own Python: per node of each kind, and per step.

Runs small networks of one kind of node each through the runtime, and subtracts the times of their operators.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from convmesh.layout import Mesh
from convmesh.lowering.loss_node import with_loss
from convmesh.measure.clock import wait_for
from convmesh.measure.operator_times import Repeats, distinct_works, processor_clock, time_works
from convmesh.planner import plan
from convmesh.plans import Program, Work
from convmesh.runtime import parallelize
from convmesh.system.operator_table import Overheads

CHANNELS = 8

Node = nn.Module | Callable[[Any, Any], Any]
"""A module, or a function of the running tensor and the first layer's output."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How nodes are measured: in networks on this mesh, split by this strategy."""

    mesh: Mesh
    strategy: str = "data"
    shape: tuple[int, ...] = (2, CHANNELS, 8, 8)
    depths: tuple[int, int] = (2, 10)
    """Number of nodes of the two networks whose difference is the cost of a node."""
    rounds: int = 3


ALONE = Setting(mesh=Mesh(data=1))


def measure_overheads(device: torch.device, kinds: Mapping[str, Callable[[], Node]] = KINDS) -> Overheads:
    """Overheads of all kinds of node; other kinds count as the median of these. Needs a job of one rank."""
    pairs = measured_pairs(device, kinds, ALONE)
    by_kind = {name: pair.node for name, pair in pairs.items()}
    fixed = statistics.median(pair.fixed for pair in pairs.values())
    forward, backward = (statistics.median(times) for times in zip(*by_kind.values(), strict=True))
    return Overheads(forward, backward, max(0.0, fixed), waits_for_loss=device.type == "cuda", kinds=by_kind)


def measured_pairs(device: torch.device, kinds: Mapping[str, Callable[[], Node]], setting: Setting) -> dict[str, _Pair]:
    """Measurements by kind of node. Needs a job of the mesh's ranks."""
    pairs = {name: _Pair(make, device, setting) for name, make in kinds.items()}
    gc.collect()
    gc.freeze()  # else collecting older objects would count as the runtime's time
    for _ in range(setting.rounds):
        for pair in pairs.values():
            pair.measure()
    gc.unfreeze()
    return pairs


class _Pair:
    """A shallow and a deep network of one kind of node."""

    def __init__(self, make: Callable[[], Node], device: torch.device, setting: Setting) -> None:
        self._few, self._many = (_Chain(make, depth, device, setting) for depth in setting.depths)
        self._depths = setting.depths
        self._least = 0.0 if device.type == "cpu" else -1.0

    def measure(self) -> None:
        """Measure once more; pairs take turns, so that a machine warming up favours none."""
        self._few.measure()
        self._many.measure()

    @property
    def program(self) -> Program:
        """The deep network's program."""
        return self._many.program

    @property
    def node(self) -> tuple[float, float]:
        """Seconds of one node outside its operators, forward and backward.

        With a GPU, an operator's own host time may exceed what the runtime adds, and the rest may be negative.
        """
        nodes = self._depths[1] - self._depths[0]
        forward, backward = ((b - a) / nodes for a, b in zip(self._few.extra, self._many.extra, strict=True))
        return max(self._least, forward), max(self._least, backward)

    @property
    def fixed(self) -> float:
        """Seconds per step, independent of the number of nodes."""
        return self._few.fixed - self._depths[0] * sum(self.node)


class _Net(nn.Module):
    """`depth` nodes of one kind in sequence; the first layer makes all of them compute gradients."""

    def __init__(self, make: Callable[[], Node], depth: int, dims: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 1) if dims > 2 else nn.Linear(CHANNELS, CHANNELS)
        self.layers = nn.ModuleList()
        self.calls: list[Any] = []
        for _ in range(depth):
            node = make()
            self.layers.extend([node] if isinstance(node, nn.Module) else [])
            self.calls.append(_ignoring_first(node) if isinstance(node, nn.Module) else node)

    def forward(self, x: Any) -> Any:
        first = y = self.first(x)
        for call in self.calls:
            y = call(y, first)
        return y


def _ignoring_first(module: nn.Module) -> Callable[[Any, Any], Any]:
    return lambda x, _: module(x)


class _Chain:
    """Splits the host time of a step of a network of one kind of node."""

    def __init__(self, make: Callable[[], Node], depth: int, device: torch.device, setting: Setting) -> None:
        model = _Net(make, depth, len(setting.shape)).to(device)
        chosen = plan(model, setting.shape, setting.mesh, setting.strategy)
        self._net = parallelize(model, chosen, loss=F.mse_loss)
        lowered = self._net._running.lowered
        shape = lowered.program.nodes[-1].outputs[0].shape
        self._x = self._net.shard_input(torch.randn(setting.shape, device=device))
        self._target = self._net.shard_target(torch.randn(shape, device=device))
        self._device = device
        self.program: Program = with_loss(lowered, F.mse_loss, shape, torch.float32)
        self._spent: list[tuple[float, float, float]] = []
        self._timings: dict[str, list[float]] = defaultdict(list)

    def measure(self) -> None:
        """Measure once more."""
        timings, _ = time_works(distinct_works([self.program]), self._device, Repeats(seconds_round=0.001, cold=False))
        for timing in timings:
            self._timings[timing.call].append(timing.seconds_host or timing.seconds)
        self._spent += [self._step() for _ in range(8)][2:]

    @property
    def extra(self) -> tuple[float, float]:
        """Host seconds in forward and in backward that operators do not explain."""
        forward, backward, _ = self._middle
        return forward - self._operators("forward"), backward - self._operators("backward")

    @property
    def fixed(self) -> float:
        """Host seconds of a whole step that operators do not explain."""
        return sum(self.extra) + self._middle[2]

    @property
    def _middle(self) -> list[float]:
        return [statistics.median(times) for times in zip(*self._spent, strict=True)]

    def _operators(self, phase: str) -> float:
        works = (step for name, _, step in self.program.steps() if name == phase and isinstance(step, Work))
        return sum(statistics.median(self._timings[work.call]) for work in works if work.call in self._timings)

    def _step(self) -> tuple[float, float, float]:
        """Seconds of forward, of backward, and of clearing gradients before them."""
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
