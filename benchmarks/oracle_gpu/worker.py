"""What is measured, in processes of their own: `case NAME`, `steps NAME`, `fused SHARE`, `host`, `graphs`.

prepare   make networks and compile, while others do so too
measure   with nothing else on the machine; replies are what the evaluation reads
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import nn

import convmesh as cm
from benchmarks.gpu_step.kernels import kernels_of
from benchmarks.oracle_gpu.cases import CASES, DEVICE, IS_SMALL, Case
from benchmarks.oracle_gpu.fused_samples import fused_samples
from benchmarks.remote_worker import answer_commands
from convmesh.lowering.loss_node import with_loss
from convmesh.lowering.lower import lower_plan
from convmesh.measure.clock import wait_for
from convmesh.measure.mixed_networks import MixedNetworks
from convmesh.measure.operator_times import Repeats, distinct_works, time_works
from convmesh.measure.updates import measure_updates
from convmesh.plans import Plan, Program, Work
from convmesh.plans.fused.peeled_bias import without_bias
from convmesh.system import System
from convmesh.system.operator_table import OperatorTable

BLOCKS = 7
SECONDS_BLOCK = 0.15
SECONDS_OPERATORS = 5.0
"""For the operators of a case; the costliest come first."""
SECONDS_PRODUCTS = 25.0
"""For its convolutions and products, however long the others must wait."""
OPERATIONS_BYTE = 180
"""That a GPU computes in bfloat16 while it moves a byte."""
REPEATS = Repeats(seconds_round=0.004, rounds=3)
HOST_RUNS, HOST_STEPS = 8, 8
device = torch.device(DEVICE)


def _in_measured_setting(measured: bool) -> None:
    """cuDNN keeps its choices by shape and by this flag, which bfloat16 does not use: none is carried over."""
    torch.backends.cudnn.benchmark = measured
    torch.backends.cudnn.allow_tf32 = measured


def plan_of(case: Case, model: torch.nn.Module) -> Plan:
    return cm.plan(model, case.sample, cm.Mesh(data=1), "data", precision="amp-bf16", compile=False)


def program_of(plan: Plan, case: Case) -> Program:
    """One rank's program, with the loss."""
    target = torch.float32 if case.task.kind == "values" else torch.int64
    return with_loss(lower_plan(plan, device=DEVICE), case.task.loss(), case.task.target_shape(case.sample), target)


def in_parts(net: Any, optimizer: torch.optim.Optimizer, batch: tuple[Any, Any]) -> list[float]:
    """A step as users write it; when the host began, and when it had cleared gradients, been through forward, through
    backward and through the update."""
    times = [time.perf_counter()]
    optimizer.zero_grad()
    times.append(time.perf_counter())
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = net(*batch)
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    optimizer.step()
    return [*times, time.perf_counter()]


def host_parts(step: Callable[[], list[float]]) -> list[float]:
    """Medians of the host's seconds for clearing gradients, forward, backward and update, in runs of steps.

    The first steps of a run do not count: the device was idle before them.
    """
    found = []
    for _ in range(HOST_RUNS):
        wait_for(device)
        times = [step() for _ in range(HOST_STEPS)][2:]
        found += [[later - sooner for sooner, later in itertools.pairwise(each)] for each in times]
    wait_for(device)
    return [statistics.median(part) for part in zip(*found, strict=True)]


class _Training:
    """A network's step as users write it."""

    def __init__(self, case: Case, compiling: bool) -> None:
        model = case.create()
        self.plan = plan_of(case, model)
        self._net = cm.parallelize(model, self.plan, loss=case.task.loss(), compile=compiling)
        x, target = case.batch()
        self._x, self._target = self._net.shard_input(x), self._net.shard_target(target)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=1e-6, momentum=0.9)  # none diverges

    def step(self) -> None:
        in_parts(self._net, self._optimizer, (self._x, self._target))

    def parts(self) -> list[float]:
        """The host's seconds for the parts of a step."""
        return host_parts(lambda: in_parts(self._net, self._optimizer, (self._x, self._target)))

    def run(self, count: int) -> float:
        """Seconds of a step."""
        wait_for(device)
        begin = time.perf_counter()
        for _ in range(count):
            self.step()
        wait_for(device)
        return (time.perf_counter() - begin) / count


class CaseWorker:
    """Steps of a network, eager and compiled, and the operators of both."""

    def __init__(self, name: str) -> None:
        self.case = CASES[name]
        self.trainings: dict[str, _Training] = {}
        self.works: list[Work] = []

    def prepare(self) -> dict[str, Any]:
        begin = time.perf_counter()
        self._make()
        plan = self.trainings["compiled"].plan
        works = distinct_works([program_of(plan, self.case)]) if self.case.is_eager else []
        compiled = distinct_works([program_of(replace(plan, compile=True), self.case)])
        self.works = _costliest_first([*{w.call: w for w in (*map(without_bias, compiled), *works)}.values()])
        return {"seconds_prepare": time.perf_counter() - begin}

    def _make(self) -> None:
        cm.init()
        _in_measured_setting(False)
        for kind in ("eager", "compiled") if self.case.is_eager else ("compiled",):
            self.trainings[kind] = _Training(self.case, kind == "compiled")
            self.trainings[kind].run(1)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()

    def measure(self) -> dict[str, Any]:
        begin = time.perf_counter()
        _in_measured_setting(True)
        counts = {name: _steps_in_block(training) for name, training in self.trainings.items()}
        blocks: dict[str, list[float]] = {name: [] for name in self.trainings}
        for _ in range(BLOCKS):
            for name, training in self.trainings.items():
                blocks[name].append(training.run(counts[name]))
        found = {name: {"seconds": statistics.median(each), "blocks": each} for name, each in blocks.items()}
        found["compiled"]["parts"] = self.trainings["compiled"].parts()
        return {**found, "seconds_measure": time.perf_counter() - begin}

    def profile(self) -> dict[str, Any]:
        if DEVICE != "cuda":
            return {}
        return {f"kernels {name}": kernels_of(training.step) for name, training in self.trainings.items()}

    def operators(self) -> dict[str, Any]:
        begin = time.perf_counter()
        known = {timing.call for timing in _shipped().timings}
        rows: list[Any] = []
        failed: list[str] = []
        wanted = [work for work in self.works if work.call not in known]
        for number, work in enumerate(wanted):
            if time.perf_counter() - begin > (SECONDS_PRODUCTS if work.flops else SECONDS_OPERATORS):
                return {"timings": rows, "untimed": len(wanted) - number, "not alone": failed}
            timings, alone = time_works([work], device, REPEATS)
            rows += [astuple(timing) for timing in timings]
            failed += alone
        return {"timings": rows, "untimed": 0, "not alone": failed}


def _costliest_first(works: list[Work]) -> list[Work]:
    """Convolutions and products, which no compiler fuses; then the others, while they are large."""
    large = [work for work in works if work.flops or work.bytes_moved > 1 << 20]
    return sorted(large, key=lambda work: (not work.flops, -work.bytes_moved - work.flops / OPERATIONS_BYTE))


def _shipped() -> OperatorTable:
    """What was timed before."""
    table = System.load("dgx-h200").operators
    assert table is not None
    return table


def _steps_in_block(training: _Training) -> int:
    """Runs a network until it is as it stays: kernels chosen, steps captured."""
    training.run(5)
    return max(2, min(40, int(SECONDS_BLOCK / training.run(2))))


class StepsWorker(CaseWorker):
    """Compiled steps of a network alone; its operators were timed before."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.case = replace(self.case, is_eager=False)

    def prepare(self) -> dict[str, Any]:
        begin = time.perf_counter()
        self._make()
        return {"seconds_prepare": time.perf_counter() - begin}


class FusedWorker:
    """A share of the kernels that stand for what compilers fuse."""

    def __init__(self, share: str) -> None:
        number, count = map(int, share.split("/"))
        self._samples = fused_samples()[number::count][: 2 if IS_SMALL else None]

    def prepare(self) -> dict[str, Any]:
        begin = time.perf_counter()
        time_works(self._samples, device, Repeats(seconds_round=1e-4, rounds=1))  # compiled once for all
        return {"seconds_prepare": time.perf_counter() - begin}

    def measure(self) -> dict[str, Any]:
        timings, failed = time_works(self._samples, device, REPEATS)
        return {"timings": [astuple(timing) for timing in timings], "not alone": failed}


class HostWorker:
    """What the host takes for nodes and steps, eager."""

    def prepare(self) -> dict[str, Any]:
        begin = time.perf_counter()
        cm.init()
        self._mixed = MixedNetworks(device)
        return {"seconds_prepare": time.perf_counter() - begin}

    def measure(self) -> dict[str, Any]:
        plain, amp = (self._mixed.seconds(dtype) for dtype in (None, torch.bfloat16))
        updates = measure_updates(device, (torch.float32,))
        return {"plain": plain, "amp": amp, "updates": {key: astuple(timing) for key, timing in updates.items()}}


class GraphWorker:
    """What a host takes for a compiled step, by the number of its weights, and a GPU for a small kernel of a graph."""

    DEPTHS = (2, 6, 12, 24)

    def prepare(self) -> dict[str, Any]:
        begin = time.perf_counter()
        cm.init()
        self._steps = {depth: _small_step(depth) for depth in self.DEPTHS}
        for step in self._steps.values():
            step()
        return {"seconds_prepare": time.perf_counter() - begin}

    def measure(self) -> dict[str, Any]:
        for step in self._steps.values():
            for _ in range(5):
                step()
        seconds, parts = ([measure(step) for step in self._steps.values()] for measure in (_seconds, host_parts))
        return {"weights": [3 * d for d in self.DEPTHS], "seconds": seconds, "parts": parts, **_graph_kernels()}


def _small_step(depth: int) -> Callable[[], list[float]]:
    """A step that its host limits: three weights a layer, tensors of a few kilobytes."""
    each = [(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(depth)]
    model = nn.Sequential(*(layer for block in each for layer in block)).to(device)
    shape = (2, 8, 8, 8)
    chosen = cm.plan(model, shape, cm.Mesh(data=1), "data")
    net = cm.parallelize(model, chosen, loss=nn.functional.mse_loss, compile=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    batch = (
        net.shard_input(torch.randn(shape, device=device)),
        net.shard_target(torch.randn(shape, device=device)),
    )
    return lambda: in_parts(net, optimizer, batch)


def _seconds(step: Callable[[], Any], count: int = 10) -> float:
    """Of a step among others like it: the median of runs."""
    found = []
    for _ in range(9):
        wait_for(device)
        begin = time.perf_counter()
        for _ in range(count):
            step()
        wait_for(device)
        found.append((time.perf_counter() - begin) / count)
    return statistics.median(found)


def _graph_kernels(count: int = 200) -> dict[str, Any]:
    """A GPU's seconds for each of many small kernels of one graph."""
    if DEVICE != "cuda":
        return {}
    small = torch.zeros(64, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            small.add_(1)
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(10):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return {"seconds_graph_kernel": begin.elapsed_time(end) / 1e3 / (10 * count)}


WORKERS: dict[str, Callable[..., Any]] = {
    "case": CaseWorker, "steps": StepsWorker, "fused": FusedWorker, "host": HostWorker, "graphs": GraphWorker,
}  # fmt: skip

if __name__ == "__main__":
    kind, *words = sys.argv[1:]
    answer_commands(lambda: WORKERS[kind](*words))
