"""Measures the host's time for nodes among other nodes: their Python, their operators' dispatch, and the launches.

The same node takes a host longer between others than repeated, and longer while its device is idle, which is when the
host matters. So small networks of all kinds of node are timed, each with more of one kind than the others; what a node
of a kind takes follows from all of them by least squares.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from convmesh.layout import Mesh
from convmesh.measure.clock import wait_for
from convmesh.measure.overheads import CHANNELS, KINDS
from convmesh.planner import plan
from convmesh.runtime import parallelize

SHAPE = (2, CHANNELS, 8, 8)
MORE = 8
"""How many more of its own kind a network has than of the others."""
STEPS = 12
ROUNDS = 3

Pair = tuple[float, float]
Matrix = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class _Mixed(nn.Module):
    """Nodes of these kinds in sequence; the first layer makes all of them compute gradients."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.layers = nn.ModuleList()
        self.calls: list[Any] = []
        for kind in kinds:
            self._add(KINDS[kind]())
            if kind == "cat":  # back to as many channels as the others take
                self._add(nn.Conv2d(2 * CHANNELS, CHANNELS, 1))

    def _add(self, node: Any) -> None:
        if isinstance(node, nn.Module):
            self.layers.append(node)
            self.calls.append(lambda x, _: node(x))
        else:
            self.calls.append(node)

    def forward(self, x: Any) -> Any:
        first = y = self.first(x)
        for call in self.calls:
            y = call(y, first)
        return y


class MixedNetworks:
    """One network for each kind of node, and one in which none is more frequent than the others."""

    def __init__(self, device: torch.device) -> None:
        draw = random.Random(0)
        self._device = device
        self._counts: list[Counter[str]] = []
        self._steps: list[_MixedStep] = []
        for more in ("", *KINDS):
            kinds = [*KINDS, *([more] * MORE if more else [])]
            draw.shuffle(kinds)
            self._steps.append(_MixedStep(_Mixed(kinds), device))
            self._counts.append(Counter([*kinds, "conv", *["conv" for kind in kinds if kind == "cat"]]))

    def seconds(self, autocast: torch.dtype | None = None) -> tuple[Mapping[str, Pair], float]:
        """Forward and backward seconds of a node of each kind; and of a step apart from its nodes."""
        gc.collect()
        gc.freeze()  # else collecting older objects would count
        for _ in range(ROUNDS):
            for step in self._steps:
                step.measure(autocast)
        gc.unfreeze()
        spent = np.array([step.take() for step in self._steps])
        counts = np.array([[1.0, *(count[kind] for kind in KINDS)] for count in self._counts])
        forward, backward, clearing = (not_negative(counts, column) for column in spent.T)
        nodes = {kind: (forward[at], backward[at]) for at, kind in enumerate(KINDS, 1)}
        return nodes, forward[0] + backward[0] + clearing[0]


def not_negative(counts: Matrix, spent: Matrix) -> list[float]:
    """What each column takes, by least squares; columns that would be negative are left out and count as zero."""
    taking = list(range(counts.shape[1]))
    while True:
        solution, *_ = np.linalg.lstsq(counts[:, taking], spent, rcond=None)
        if min(solution) >= 0:
            break
        del taking[int(np.argmin(solution))]
    return [float(solution[taking.index(at)]) if at in taking else 0.0 for at in range(counts.shape[1])]


class _MixedStep:
    """The host's seconds of a network's step: forward, backward, and clearing gradients."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        model = model.to(device)
        self._device = device
        self._net = parallelize(model, plan(model, SHAPE, Mesh(data=1), "data"), loss=F.mse_loss)
        self._x = self._net.shard_input(torch.randn(SHAPE, device=device))
        self._target = self._net.shard_target(torch.randn(SHAPE, device=device))
        self._spent: list[tuple[float, ...]] = []

    def measure(self, autocast: torch.dtype | None) -> None:
        self._spent += [self._step(autocast) for _ in range(STEPS)][2:]

    def take(self) -> list[float]:
        """The medians of what was measured since the last call."""
        spent, self._spent = self._spent, []
        return [statistics.median(times) for times in zip(*spent, strict=True)]

    def _step(self, autocast: torch.dtype | None) -> tuple[float, ...]:
        wait_for(self._device)
        clocks = [time.perf_counter()]
        with torch.autocast(self._device.type, autocast) if autocast else nullcontext():
            loss = self._net(self._x, self._target)
        clocks.append(time.perf_counter())
        loss.backward()
        clocks.append(time.perf_counter())
        self._net.zero_grad()
        clocks.append(time.perf_counter())
        return tuple(b - a for a, b in pairwise(clocks))
