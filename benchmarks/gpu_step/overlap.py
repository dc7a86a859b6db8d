"""What runs on a GPU beside its transfers: a trace of a split step on two NCCL ranks that share the GPU.

python -m benchmarks.gpu_step.overlap unet3d depth=2 [--samples 4] [--out FOLDER]     measures, writes traces
python -m benchmarks.gpu_step.overlap --table TRACE.json.gz                           the table of a trace

NCCL from 2.30 on lets ranks share a GPU with NCCL_MULTI_RANK_GPU_ENABLE=1, under MPS. Traces open in ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

STEPS_BEFORE = 6
STEPS = 2
BACKEND = {"cuda": "nccl", "cpu": "gloo"}


class Kernel(NamedTuple):
    """A kernel's time on the GPU, in microseconds."""

    name: str
    stream: int
    begin: float
    end: float

    @property
    def is_transfer(self) -> bool:
        return self.name.startswith("nccl")


class Beside(NamedTuple):
    """Transfers of one kind on one stream, and how long of it other kernels ran."""

    kind: str
    stream: int
    kernels: int
    us: float
    us_beside: float


def beside(kernels: Iterable[Kernel]) -> list[Beside]:
    """For every kind of transfer and stream: the microseconds, and those in which a kernel that sends nothing runs."""
    known = sorted(kernels, key=lambda kernel: kernel.begin)
    busy = _joined([(k.begin, k.end) for k in known if not k.is_transfer])
    groups: dict[tuple[str, int], list[Kernel]] = {}
    for kernel in known:
        if kernel.is_transfer:
            groups.setdefault((_kind(kernel.name), kernel.stream), []).append(kernel)
    return [
        Beside(kind, stream, len(of), sum(k.end - k.begin for k in of), sum(_common(k, busy) for k in of))
        for (kind, stream), of in sorted(groups.items())
    ]


def _kind(name: str) -> str:
    """`SendRecv` of `ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)`."""
    return name.split("(")[0].split("_")[1] if "_" in name else name


def _joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of spans, which are in the order of their beginnings."""
    found: list[tuple[float, float]] = []
    for begin, end in spans:
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _common(kernel: Kernel, spans: Sequence[tuple[float, float]]) -> float:
    return sum(max(0.0, min(kernel.end, end) - max(kernel.begin, begin)) for begin, end in spans)


def kernels_in(trace: Path) -> list[Kernel]:
    """The kernels of a trace that torch's profiler wrote."""
    data = trace.read_bytes()
    events = json.loads(gzip.decompress(data) if trace.suffix == ".gz" else data)["traceEvents"]
    chosen = [e for e in events if e.get("cat") == "kernel"]
    return [Kernel(e["name"], int(e["args"]["stream"]), e["ts"], e["ts"] + e["dur"]) for e in chosen]


def table(kernels: Sequence[Kernel]) -> str:
    """Rows of a page."""
    lines = ["| transfer | stream | kernels | µs | µs beside other kernels |", "| --- | --- | --- | --- | --- |"]
    for row in beside(kernels):
        share = row.us_beside / row.us if row.us else 0.0
        lines.append(
            f"| {row.kind} | {row.stream} | {row.kernels} | {row.us:.0f} | {row.us_beside:.0f} ({share:.0%}) |"
        )
    others = [k for k in kernels if not k.is_transfer]
    busy = sum(end - begin for begin, end in _joined(sorted((k.begin, k.end) for k in others)))
    return "\n".join([*lines, f"{len(others)} kernels that send nothing keep the GPU busy for {busy:.0f} µs."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", default="unet3d")
    parser.add_argument("mesh", nargs="?", default="depth=2", help="of two ranks")
    parser.add_argument("--samples", type=int, help="of the batch; by default those of the case")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--wait-for", type=Path, help="profile when this file is there")
    parser.add_argument("--table", type=Path, help="a trace")
    options = parser.parse_args()
    if options.table is not None:
        print(table(kernels_in(options.table)))
        return
    from torch.multiprocessing.spawn import spawn

    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (f"{folder}/store", options), nprocs=2)


def _rank(rank: int, store: str, options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from benchmarks.gpu_step.cases import DEVICE

    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(BACKEND[DEVICE], init_method=f"file://{store}", rank=rank, world_size=2)
    torch.backends.cudnn.benchmark = True
    steps = {kind: _step(options, kind == "compiled") for kind in ("eager", "compiled")}
    for step in steps.values():
        for _ in range(STEPS_BEFORE):
            step()
    print(f"rank {rank} of {options.case} {options.mesh} is ready", flush=True)
    while options.wait_for is not None and not options.wait_for.exists():
        time.sleep(0.1)
    for kind, step in steps.items():
        name = f"overlap-{options.case}-{options.mesh.replace('=', '')}-{kind}"
        _profiled(step, options.out / f"{name}.json.gz" if rank == 0 else None)


def _step(options: argparse.Namespace, compiling: bool) -> Callable[[], Any]:
    import convmesh as cm
    from benchmarks.gpu_step.cases import CASES, DEVICE
    from benchmarks.gpu_step.trainings import training
    from convmesh.plans import strategy_for

    case = CASES[options.case]
    case = dataclasses.replace(case, shape=(options.samples or case.shape[0], *case.shape[1:]))
    name, extent = options.mesh.split("=")
    mesh, model = cm.Mesh(**{name: int(extent)}), case.create(last=True)
    plan = cm.plan(model, case.shape, mesh, strategy_for(mesh), batchnorm="replica")
    net = cm.parallelize(model, plan, loss=case.loss(), compile=compiling, mesh=cm.open_mesh(mesh, device=DEVICE))
    x, target = case.batch(last=True)
    args = net.shard_input(x), net.shard_target(target)
    return training(case, list(net.parameters()), lambda: net(*args)).step


def _profiled(step: Callable[[], Any], trace: Path | None) -> None:
    """Steps of all ranks, each behind the one before; the first rank writes its trace and table."""
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.gpu_step.cases import DEVICE
    from convmesh.dist.barriers import wait_for_all
    from convmesh.measure.clock import wait_for

    step()
    wait_for_all()
    with profile(activities=[ProfilerActivity.CUDA if DEVICE == "cuda" else ProfilerActivity.CPU]) as seen:
        for _ in range(STEPS):
            step()
        wait_for(_device(DEVICE))
    wait_for_all()
    if trace is not None:
        seen.export_chrome_trace(str(trace))
        print(f"{trace.name.split('.')[0]}, {STEPS} steps\n\n{table(kernels_in(trace))}\n", flush=True)


def _device(name: str) -> Any:
    import torch

    return torch.device(name)


if __name__ == "__main__":
    main()
