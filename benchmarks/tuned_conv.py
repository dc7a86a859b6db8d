"""Our convolution kernels beside cuDNN's, on one GPU; every configuration is checked and timed.

python -m benchmarks.tuned_conv --out FILE.json [--only WORD ...]      measures; --help lists limits of time
python -m benchmarks.tuned_conv --table FILE.json      from a result, the table that compiled steps choose kernels by

Processes compile and check the configurations of all shapes first, against float32 without TF32, each on memory full
of NaN. Then one process times those that are right, briefly; then the fastest few for longer, and cuDNN in both memory
formats before and after them: kernels only, see gpu_timing.py. `--only` gives the order, too. `--dry` runs tiny shapes
in Triton's interpreter, without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as OutOfTime
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from convmesh.kernels.tuned.conv_configs import KernelConfig, forward_configs, weight_configs
from convmesh.kernels.tuned.conv_shape import ConvShape
from convmesh.kernels.tuned.conv_table import ConvTable, Measured, best_rows, shipped_table, write_table
from convmesh.kernels.tuned.group_configs import grouped_configs

DEVICE = os.environ.get("TUNED_CONV_DEVICE", "cuda")
PROCESSORS = 132
PARTS = ("forward", "input", "weight")
WORST = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-3}
"""Largest norm of a difference, as a fraction of the norm."""


def cube(samples: int, channels: int, filters: int, extent: int, kernel: int = 3, stride: int = 1) -> ConvShape:
    """A convolution of cubes whose output is as large as its input, or a `stride`-th of it."""
    x, weight = (samples, channels, *[extent] * 3), (filters, channels, *[kernel] * 3)
    return ConvShape.of(x, weight, [stride] * 3, [kernel // 2] * 3, [1] * 3)


def image(samples: int, channels: int, filters: int, extent: int, kernel: int, stride: int) -> ConvShape:
    """A convolution of square images."""
    x, weight = (samples, channels, *[extent] * 2), (filters, channels, *[kernel] * 2)
    return ConvShape.of(x, weight, [stride] * 2, [kernel // 2] * 2, [1] * 2)


SHAPES = {
    "few": [cube(1, c, f, 128) for c, f in ((4, 32), (1, 32), (4, 16))],
    "more": [cube(1, c, f, 128) for c, f in ((8, 64), (16, 32))],
    "shard": [cube(1, 64, 8, 128)],
    "cosmoflow": [cube(8, 4, 32, 128)],
    "second": [cube(8, 32, 64, 64)],
    "nnunet": [cube(2, 1, 32, 128)],
    "stems": [image(64, 3, 64, 224, 7, 2), image(32, 3, 64, 224, 3, 1)],
    "inner": [cube(1, 32, 32, 128)],
    "dry": [cube(1, 4, 8, 8), cube(1, 8, 4, 8)],
}
FIRST_LAYERS = ("cosmoflow", "nnunet", "stems")
"""They need no gradient of their input."""
MOST = 25
"""Configurations of a phase that are tried, likely ones first."""
FEW_TO_TIME = 5
CHUNK = 6
"""Configurations that a process compiles at a time."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One phase of one convolution."""

    shape: ConvShape
    part: str
    dtype: str = "bfloat16"

    def configs(self, processors: int) -> list[KernelConfig]:
        """What the shipped table has, what is near to it, and what has been tried less."""
        mirror = self.shape.mirrored()
        known = self._known()
        if self.part == "weight":
            swapped = []
            if mirror is not None and self.shape.filters < self.shape.channels:
                swapped = [dataclasses.replace(c, swapped=1) for c in weight_configs(mirror, processors)]
            return _likely([*known, *nearby(known), *swapped, *weight_configs(self.shape, processors)])
        shape = self.shape if self.part == "forward" else mirror
        if shape is None:
            return []
        return _likely([*known, *grouped_configs(shape), *forward_configs(shape)])

    def _known(self) -> list[KernelConfig]:
        table = shipped_table("NVIDIA H200")
        rows = table.rows if table is not None else ()
        return [row.config for row in rows if (row.phase, row.shape, row.dtype) == (self.part, self.shape, self.dtype)]


def _likely(configs: list[KernelConfig]) -> list[KernelConfig]:
    return list(dict.fromkeys(configs))[:MOST]


def nearby(configs: list[KernelConfig]) -> Iterator[KernelConfig]:
    """Of a weight's gradient: more or fewer parts, longer or shorter strips, more or fewer tiles under way."""
    for config in configs:
        yield from (dataclasses.replace(config, parts=parts) for parts in (config.parts // 2, config.parts * 2))
        yield from (dataclasses.replace(config, walk=walk) for walk in (config.walk // 4, config.walk * 4))
        yield from (dataclasses.replace(config, stages=stages, flat=flat) for stages, flat in ((2, 0), (2, 1), (4, 1)))


class Operands:
    """Tensors of a job on the GPU, and what computes it."""

    def __init__(self, job: Job) -> None:
        import torch

        self.torch, self.job, shape = torch, job, job.shape
        dtype, last = getattr(torch, job.dtype), torch.channels_last_3d
        draw = torch.Generator(DEVICE).manual_seed(1)

        def drawn(*sizes: int) -> Any:
            values = torch.randn(sizes, device=DEVICE, generator=draw, dtype=dtype)
            return values.contiguous(memory_format=last)

        self.x = drawn(shape.samples, shape.channels, *shape.extents)
        self.weight = drawn(shape.filters, shape.channels, *shape.kernel) / shape.taps**0.5
        self.grad = drawn(shape.samples, shape.filters, *shape.out)

    def plain(self) -> Operands:
        """The same in the plain memory format."""
        self.x, self.weight, self.grad = (t.contiguous() for t in (self.x, self.weight, self.grad))
        return self

    def single(self) -> Operands:
        """The same in float32."""
        self.x, self.weight, self.grad = (t.float() for t in (self.x, self.weight, self.grad))
        return self

    def torchs(self) -> Any:
        shape, convolution = self.job.shape, self.torch.ops.aten
        rest = (list(shape.stride), list(shape.padding), list(shape.dilation), False, [0, 0, 0], 1)
        if self.job.part == "forward":
            return convolution.convolution(self.x, self.weight, None, *rest)
        wanted = [self.job.part == "input", self.job.part == "weight", False]
        results = convolution.convolution_backward(self.grad, self.x, self.weight, None, *rest, wanted)
        return results[0] if wanted[0] else results[1]

    def ours(self, config: KernelConfig, has_bias: bool = False) -> Any:
        from convmesh.kernels.tuned import conv_launch

        shape = self.job.shape
        if self.job.part == "forward":
            return conv_launch.convolve(self.x, self.weight, None, shape, config)
        if self.job.part == "input":
            return conv_launch.input_gradient(self.grad, self.weight, shape, config)
        return conv_launch.weight_gradient(self.grad, self.x, shape, config, has_bias)[0]


def checked(job: Job, configs: list[KernelConfig]) -> dict[str, Any]:
    """Compile configurations of a job and compare them with float32."""
    import torch

    torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad():
        operands, expected, norm = _references(job)
        errors: list[Any] = []
        for config in configs:
            torch.full(expected.shape, float("nan"), dtype=operands.x.dtype, device=DEVICE)  # what is not written shows
            try:
                got = operands.ours(config)
                errors.append((got.float() - expected).norm().item() / norm)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}"[:160])
    return {"errors": errors}


@lru_cache(maxsize=1)
def _references(job: Job) -> tuple[Operands, Any, float]:
    """Operands, and the result in float32 with its norm."""
    expected = Operands(job).single().torchs()
    return Operands(job), expected, expected.norm().item()


def timed(call: Callable[[], Any], milliseconds: float = 16) -> float:
    """Milliseconds of a call, the median."""
    if DEVICE == "cpu":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    from benchmarks.gpu_timing import milliseconds_of

    return milliseconds_of(call, milliseconds)


def measured(job: Job, right: dict[KernelConfig, float]) -> dict[str, Any]:
    """cuDNN in both formats and the right configurations, in milliseconds: all briefly, the fastest few again."""
    import torch

    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    operands = Operands(job)
    with torch.no_grad():
        last = timed(operands.torchs, 30)
        brief = sorted((timed(lambda c=config: operands.ours(c), 2), dataclasses.astuple(config)) for config in right)  # type: ignore[misc]
        again = [KernelConfig(*numbers) for _, numbers in brief[:FEW_TO_TIME]]
        found = [(timed(lambda c=c: operands.ours(c), 30), dataclasses.astuple(c), right[c]) for c in again]  # type: ignore[misc]
        best = KernelConfig(*min(found)[1]) if found else None
        biased = timed(lambda: operands.ours(best, True), 16) if best is not None and job.part == "weight" else None
        last = min(last, timed(operands.torchs, 30))
        plain = timed(operands.plain().torchs, 16)
    return {"last": last, "plain": plain, "ours": sorted(found), "with_bias": biased, "brief": brief}


def jobs(words: list[str]) -> Iterator[Job]:
    listed: dict[Job, None] = {}
    for name in words or [name for name in SHAPES if name != "dry"]:
        dtype = "float32" if name == "dry" else "bfloat16"  # the interpreter knows no bfloat16
        parts = [part for part in PARTS if name not in FIRST_LAYERS or part != "input"]
        listed |= {Job(shape, part, dtype): None for shape in SHAPES[name] for part in parts}
    yield from listed


def floor_ms(shape: ConvShape) -> float:
    """The least time of one phase in bf16: 4.3 TB/s, 780 TFLOP/s."""
    return max(shape.bytes_moved(2) / 4.3e12, shape.flops / 780e12) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs="+")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--compile-seconds", type=float, default=150)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    if options.table:
        _write_table([row for file in options.table for row in json.loads(file.read_text())["rows"]], options.table[-1])
        return
    begin = time.monotonic()
    errors = _checked_by_processes(["dry"] if options.dry else options.only, options.processes, options.compile_seconds)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    _time_all(errors, options.out, begin + options.seconds)


Checked = dict[Job, dict[KernelConfig, Any]]
"""Of each configuration the norm of its error, or what went wrong."""


def _checked_by_processes(words: list[str], processes: int, seconds: float) -> Checked:
    """Configurations in the order of jobs, so that a limit of time cuts off the last jobs."""
    errors: Checked = {job: {} for job in jobs(words)}
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    configs = {job: job.configs(PROCESSORS)[:: 40 if DEVICE == "cpu" else 1] for job in errors}
    chunks = [(job, all_of[i : i + CHUNK]) for job, all_of in configs.items() for i in range(0, len(all_of), CHUNK)]
    waiting = {pool.submit(checked, job, some): (job, some) for job, some in chunks}
    try:
        for done in as_completed(waiting, timeout=seconds):
            job, some = waiting[done]
            try:
                errors[job] |= dict(zip(some, done.result()["errors"], strict=True))
            except Exception as error:
                print(f"{job.shape} {job.part}: {error!r}"[:300], flush=True)
    except OutOfTime:
        print(f"{sum(not f.done() for f in waiting)} of {len(waiting)} chunks were not compiled in time", flush=True)
    for process in list((pool._processes or {}).values()):
        process.kill()
    return errors


def _time_all(errors: Checked, out: Path, end: float) -> None:
    rows = []
    for job, found in errors.items():
        if time.monotonic() > end:
            print(f"out of time before {job.shape} {job.part}", flush=True)
            continue
        right = {c: e for c, e in found.items() if isinstance(e, float) and e <= WORST[job.dtype]}
        wrong = [e for e in found.values() if not isinstance(e, float) or not e <= WORST[job.dtype]]
        row: dict[str, Any] = {"shape": str(job.shape), "part": job.part, "floor": floor_ms(job.shape), "wrong": wrong}
        try:
            row |= measured(job, right)
        except Exception as error:
            print(f"{job.shape} {job.part}: {error!r}"[:300], flush=True)
            continue
        rows.append(row)
        best = row["ours"][0] if row["ours"] else (float("nan"), None, None)
        print(
            f"{row['shape']:60s} {job.part:8s} floor {row['floor']:.3f} cudnn {row['last']:.3f} {row['plain']:.3f} "
            f"ours {best[0]:.3f} {best[1]} biased {row['with_bias']} wrong {len(wrong)}/{len(found)} {wrong[:1]}",
            flush=True,
        )
        out.write_text(json.dumps({"about": _about(), "rows": rows}))


def _about() -> dict[str, str]:
    import datetime

    import torch
    import triton

    return {
        "date": str(datetime.date.today()),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
        "command": "python -m benchmarks.tuned_conv",
    }


def _write_table(rows: list[dict[str, Any]], file: Path) -> None:
    about = json.loads(file.read_text())["about"]
    measurements = (
        Measured(
            row["part"],
            ConvShape.parse(row["shape"]),
            "bfloat16",
            KernelConfig(*row["ours"][0][1]),
            round(row["ours"][0][0] / 1e3, 8),
            round(min(row["last"], row["plain"]) / 1e3, 8),
        )
        for row in rows
        if row["ours"]
    )
    device = about.pop("device")
    name = device.lower().replace(" ", "-")
    before = shipped_table(device)
    kept = before.rows if before is not None else ()
    table = write_table(ConvTable(device, best_rows([*kept, *measurements])), about)
    folder = Path("src/convmesh/kernels/tuned/tables")
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(table)


if __name__ == "__main__":
    main()
