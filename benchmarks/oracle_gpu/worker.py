"""What is measured, in processes of their own: `case NAME`, `fused SHARE`, `host`, `graphs`.

prepare   make networks and compile, while others do so too
measure   with nothing else on the machine; replies are what the evaluation reads
"""

from __future__ import annotations

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

BLOCKS = 7
SECONDS_BLOCK = 0.15
SECONDS_OPERATORS = 5.0
"""For the operators of a case; the costliest come first."""
REPEATS = Repeats(seconds_round=0.004, rounds=3)
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


class _Training:
    """A network's step as users write it."""

    def __init__(self, case: Case, compiling: bool) -> None:
        model = case.create()
        self.plan = plan_of(case, model)
        self._net = cm.parallelize(model, self.plan, loss=case.task.loss(), compile=compiling)
        x, target = case.batch()
        self._x, self._target = self._net.shard_input(x), self._net.shard_target(target)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=1e-4, momentum=0.9)

    def step(self) -> None:
        self._optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = self._net(self._x, self._target)
        loss.backward()
        self._optimizer.step()

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
        self.failures: dict[str, str] = {}

    def prepare(self) -> dict[str, Any]:
        begin = time.perf_counter()
        cm.init()
        _in_measured_setting(False)
        self.trainings["eager"] = eager = _Training(self.case, False)
        eager.run(1)
        if self.case.compiles:
            self.trainings["compiled"] = _Training(self.case, True)
            self.trainings["compiled"].run(1)
            torch.cuda.empty_cache()
        works = distinct_works([program_of(eager.plan, self.case)])
        if self.case.compiles:
            compiled = distinct_works([program_of(replace(eager.plan, compile=True), self.case)])
            works = [*{work.call: work for work in (*map(without_bias, compiled), *works)}.values()]
        self.works = _costliest_first(works)
        return {"seconds_prepare": time.perf_counter() - begin}

    def measure(self) -> dict[str, Any]:
        begin = time.perf_counter()
        _in_measured_setting(True)
        counts = {name: _steps_in_block(training) for name, training in self.trainings.items()}
        blocks: dict[str, list[float]] = {name: [] for name in self.trainings}
        for _ in range(BLOCKS):
            for name, training in self.trainings.items():
                blocks[name].append(training.run(counts[name]))
        found = {name: {"seconds": statistics.median(each), "blocks": each} for name, each in blocks.items()}
        return {**found, "seconds_measure": time.perf_counter() - begin}

    def profile(self) -> dict[str, Any]:
        if DEVICE != "cuda":
            return {}
        return {f"kernels {name}": kernels_of(training.step) for name, training in self.trainings.items()}

    def operators(self) -> dict[str, Any]:
        until = time.perf_counter() + SECONDS_OPERATORS
        rows: list[Any] = []
        failed: list[str] = []
        for number, work in enumerate(self.works):
            if time.perf_counter() > until and not work.flops:
                return {"timings": rows, "untimed": len(self.works) - number, "not alone": failed}
            timings, alone = time_works([work], device, REPEATS)
            rows += [astuple(timing) for timing in timings]
            failed += alone
        return {"timings": rows, "untimed": 0, "not alone": failed}


def _costliest_first(works: list[Work]) -> list[Work]:
    """Convolutions and products, which no compiler fuses; then the others, while they are large."""
    large = [work for work in works if not work.flops and work.bytes_moved > 1 << 20]
    return [w for w in works if w.flops] + sorted(large, key=lambda work: -work.bytes_moved)


def _steps_in_block(training: _Training) -> int:
    """Runs a network until it is as it stays: kernels chosen, steps captured."""
    training.run(5)
    return max(2, min(40, int(SECONDS_BLOCK / training.run(2))))


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
    """What the host takes for a compiled step, and a GPU for a small kernel of a graph."""

    DEPTHS = (2, 12)

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
        seconds = {depth: statistics.median(_seconds(step) for _ in range(40)) for depth, step in self._steps.items()}
        host = {depth: statistics.median(_host(step) for _ in range(40)) for depth, step in self._steps.items()}
        return {"seconds": seconds, "seconds_host": host, "weights": [3 * d for d in self.DEPTHS], **_graph_kernels()}


def _small_step(depth: int) -> Callable[[], None]:
    each = [(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(depth)]
    model = nn.Sequential(*(layer for block in each for layer in block)).to(device)
    shape = (2, 8, 8, 8)
    chosen = cm.plan(model, shape, cm.Mesh(data=1), "data")
    net = cm.parallelize(model, chosen, loss=nn.functional.mse_loss, compile=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    x, target = (
        net.shard_input(torch.randn(shape, device=device)),
        net.shard_target(torch.randn(shape, device=device)),
    )

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = net(x, target)
        loss.backward()
        optimizer.step()

    return step


def _seconds(step: Callable[[], None]) -> float:
    wait_for(device)
    begin = time.perf_counter()
    for _ in range(5):
        step()
    wait_for(device)
    return (time.perf_counter() - begin) / 5


def _host(step: Callable[[], None]) -> float:
    wait_for(device)
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


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
    "case": CaseWorker, "fused": FusedWorker, "host": HostWorker, "graphs": GraphWorker,
}  # fmt: skip

if __name__ == "__main__":
    kind, *words = sys.argv[1:]
    answer_commands(lambda: WORKERS[kind](*words))
