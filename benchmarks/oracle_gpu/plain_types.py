"""Whole training steps of eight networks on one GPU, compared with the oracle's predictions from operator times.

python -m benchmarks.oracle_gpu.plain_types [--out FOLDER] [NETWORK ...]     writes table, runs and page to the folder
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import convmesh as cm
from convmesh import models
from convmesh.lowering.loss_node import with_loss
from convmesh.lowering.lower import lower_plan
from convmesh.measure.operator_times import distinct_works, time_works
from convmesh.measure.overheads import measure_overheads
from convmesh.measure.updates import measure_updates
from convmesh.oracle import Assumptions, predict_programs
from convmesh.oracle.pricing.compute_model import ComputeModel
from convmesh.plans import Program, Work
from convmesh.system import System
from convmesh.system.operator_table import OperatorTable

BLOCKS = 5
SECONDS_BLOCK = 0.4


@dataclass(frozen=True, slots=True)
class Case:
    """A network, its batch, and its number and memory formats."""

    model: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    last: bool = True
    """Whether tensors are channels-last, the best format for tensor cores."""
    short: bool = False
    """Whether the batch is small enough for the device to wait for its host."""

    @property
    def name(self) -> str:
        return f"{self.model} {self.shape[0]}"

    def create(self, device: str) -> torch.nn.Module:
        with torch.device(device):
            model = models.create(self.model).to(getattr(torch, self.dtype))
        order = torch.channels_last if self.last else torch.contiguous_format
        return model.to(memory_format=order)  # type: ignore[call-overload, no-any-return]

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        task = models.find(self.model).task
        target = task.draw_target(self.shape)
        x = torch.randn(self.shape, dtype=getattr(torch, self.dtype))
        x = x.contiguous(memory_format=torch.channels_last) if self.last else x
        return x, target.to(x.dtype) if target.is_floating_point() else target

    def program(self) -> Program:
        """The program of a single rank, including the loss."""
        model = self.create("meta")
        lowered = lower_plan(cm.plan(model, self.shape, cm.Mesh(data=1), "data"))
        task = models.find(self.model).task
        target_dtype = getattr(torch, self.dtype) if task.kind == "values" else torch.int64
        return with_loss(lowered, task.loss(), task.target_shape(self.shape), target_dtype)


CASES = {
    case.name: case
    for case in (
        Case("resnet50", (256, 3, 224, 224)),
        Case("vgg16", (64, 3, 224, 224)),
        Case("densenet121", (256, 3, 224, 224)),
        Case("mobilenet-v2", (256, 3, 224, 224)),
        Case("convnext-tiny", (256, 3, 224, 224)),
        Case("unet2d", (8, 1, 512, 512)),
        Case("unet3d", (2, 1, 128, 128, 128), "float32", last=False),
        Case("cosmoflow", (8, 4, 128, 128, 128), "float32", last=False),
        Case("resnet50", (32, 3, 224, 224), short=True),
        Case("mobilenet-v2", (32, 3, 224, 224), short=True),
        Case("densenet121", (16, 3, 224, 224), short=True),
        Case("convnext-tiny", (16, 3, 224, 224), short=True),
    )
}


@dataclass(frozen=True, slots=True)
class Run:
    """Measured steps of one case."""

    seconds_step: float
    spread: float
    bytes_peak: int
    joules_step: float
    seconds_forward: float
    seconds_backward: float
    seconds_update: float


def measure(case: Case) -> Run:
    """Time steps in blocks without synchronising between them; then some with, to see where time goes."""
    torch.manual_seed(0)
    model = case.create("cuda")
    plan = cm.plan(model, case.shape, cm.Mesh(data=1), "data")
    net = cm.parallelize(model, plan, models.find(case.model).task.loss())
    x, target = case.batch()
    x, target = net.shard_input(x), net.shard_target(target)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        net(x, target).backward()
        optimizer.step()

    for _ in range(3):
        step()
    gc.collect()
    gc.freeze()  # else collections would scan this process's tables and programs, which no training run has
    torch.cuda.reset_peak_memory_stats()
    count = max(3, int(SECONDS_BLOCK / _timed(step, 3)))
    before = _joules()
    blocks = [_timed(step, count) for _ in range(BLOCKS)]
    joules = (_joules() - before) / (BLOCKS * count)
    peak = torch.cuda.max_memory_allocated()
    gc.unfreeze()
    phases = [_phases(net, x, target, optimizer) for _ in range(5)]
    forward, backward, update = (statistics.median(times) for times in zip(*phases, strict=True))
    middle = statistics.median(blocks)
    return Run(middle, (max(blocks) - min(blocks)) / 2 / middle, peak, joules, forward, backward, update)


def _timed(step: Callable[[], None], count: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def _phases(net: Any, x: Any, target: Any, optimizer: Any) -> tuple[float, ...]:
    optimizer.zero_grad()
    loss: list[torch.Tensor] = []
    return (
        _timed(lambda: loss.append(net(x, target)), 1),
        _timed(lambda: loss.pop().backward(), 1),
        _timed(optimizer.step, 1),
    )


def _joules() -> float:
    """The energy counter of the first GPU; 0 without one."""
    import ctypes

    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        library.nvmlInit_v2()
        handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
        library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
        library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
    except (OSError, AttributeError):
        return 0.0
    return millijoules.value / 1e3


def first_table() -> OperatorTable:
    """Optimiser and runtime costs on this GPU; operators are added network by network."""
    device = torch.device("cuda")
    about = {
        "date": str(datetime.date.today()),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "settings": f"cudnn.benchmark={torch.backends.cudnn.benchmark}, tf32 in convolutions",
    }
    updates = measure_updates(device, (torch.float32, torch.bfloat16))
    return OperatorTable(torch.cuda.get_device_name(), (), updates, measure_overheads(device), about)


def with_operators(table: OperatorTable, program: Program) -> OperatorTable:
    """The table extended by the program's operators that it lacks."""
    wanted = [work for work in distinct_works([program]) if table.find(work.call) is None]
    timings, failed = time_works(wanted, torch.device("cuda"))
    print(f"{len(timings)} operators timed; failed in isolation: {failed}")
    return replace(table, timings=(*table.timings, *timings))


@dataclass(frozen=True, slots=True)
class Row:
    """A case's prediction and its measured run."""

    predicted: float
    measured: float
    device: float
    host: float
    basis: str

    @property
    def accuracy(self) -> float:
        return 1 - abs(self.predicted - self.measured) / self.measured


def predict(case: Case, table: OperatorTable, run: Run) -> Row:
    program = case.program()
    system = replace(System.load("dgx-h200"), operators=table)
    predicted = predict_programs({0: program}, system, Assumptions(tf32=True))
    compute = ComputeModel(system)
    works = [s for _, _, s in program.steps() if isinstance(s, Work)]
    device = sum(compute.work(w).value for w in works)
    host = sum(compute.host(w) for w in works)
    return Row(predicted.seconds_step, run.seconds_step, device, host, predicted.seconds.basis)


def page(rows: dict[str, Row], runs: dict[str, Run]) -> str:
    lines = [
        "| network | sample | measured ms | spread | predicted ms | accuracy | peak GiB | J per step |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        run, case = runs[name], CASES[name]
        shape = "×".join(map(str, case.shape[1:]))
        lines.append(
            f"| {name}, {case.dtype} | {shape} | {1e3 * row.measured:.2f} | ±{run.spread:.1%} "
            f"| {1e3 * row.predicted:.2f} | {row.accuracy:.1%} | {run.bytes_peak / 2**30:.2f} | {run.joules_step:.1f} |"
        )
    return "\n".join([*lines, "", *(_mean(rows, short) for short in (False, True))])


def _mean(rows: dict[str, Row], short: bool) -> str:
    accuracies = [row.accuracy for name, row in rows.items() if CASES[name].short == short]
    kind = "steps that wait for their host" if short else "batches that fill the device"
    return f"Mean accuracy, {kind}: {statistics.mean(accuracies):.1%}." if accuracies else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=list(CASES))
    parser.add_argument("--table", type=Path, help="operator table of an earlier run")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    options = parser.parse_args()
    cm.init()
    runs: dict[str, Run] = {}
    table = first_table()
    table = OperatorTable.load(options.table).merged(table) if options.table else table
    print(table.overheads, table.updates)
    for name in options.networks:
        begin = time.perf_counter()
        runs[name] = measure(CASES[name])
        _free()
        table = with_operators(table, CASES[name].program())
        _free()
        row = predict(CASES[name], table, runs[name])
        print(name, f"{time.perf_counter() - begin:.1f} s", runs[name], row, f"{row.accuracy:.1%}", flush=True)
        table.save(options.out / "operators.json.gz")
        (options.out / "runs.json").write_text(json.dumps({n: asdict(r) for n, r in runs.items()}, indent=1))
    rows = {name: predict(CASES[name], table, run) for name, run in runs.items()}
    text = page(rows, runs)
    (options.out / "page.md").write_text(f"{table.about['date']}, {table.device}, {table.about}\n\n{text}\n")
    print(text)


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
