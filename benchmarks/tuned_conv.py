"""Our convolution kernels beside cuDNN's, on one GPU; every configuration is checked and timed.

python -m benchmarks.tuned_conv --out FILE.json [--only WORD ...]      measures; --help lists limits of time
python -m benchmarks.tuned_conv --table FILE.json      from a result, the table that compiled steps choose kernels by

Processes compile and check the configurations of a shape first, against float32 without TF32. Then one process times
those that are right, in alternation with cuDNN in both memory formats.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as OutOfTime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from convmesh.kernels.tuned.conv_configs import KernelConfig, forward_configs, weight_configs
from convmesh.kernels.tuned.conv_shape import ConvShape
from convmesh.kernels.tuned.conv_table import ConvTable, Measured, best_rows, write_table

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
    "cosmoflow": [cube(8, 4, 32, 128)],
    "nnunet": [cube(2, 1, 32, 128)],
    "goals": [cube(1, c, f, 128) for c, f in ((4, 32), (1, 32), (4, 16), (8, 64), (16, 32))],
    "shards": [cube(1, 64, 8, 128), cube(1, 8, 64, 128)],
    "stems": [image(64, 3, 64, 224, 7, 2), image(32, 3, 64, 224, 3, 1)],
}
OF_INPUT = ("goals", "shards")
"""First layers of networks need no gradient of their input."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One phase of one convolution."""

    shape: ConvShape
    part: str
    dtype: str = "bfloat16"

    def configs(self, processors: int) -> list[KernelConfig]:
        if self.part == "weight":
            return list(weight_configs(self.shape, processors))
        shape = self.shape if self.part == "forward" else self.shape.mirrored()
        return [] if shape is None else list(forward_configs(shape))


class Operands:
    """Tensors of a job on the GPU, and what computes it."""

    def __init__(self, job: Job) -> None:
        import torch

        self.torch, self.job, shape = torch, job, job.shape
        torch.backends.cudnn.benchmark = True
        dtype, last = getattr(torch, job.dtype), torch.channels_last_3d
        draw = torch.Generator("cuda").manual_seed(1)

        def drawn(*sizes: int) -> Any:
            values = torch.randn(sizes, device="cuda", generator=draw, dtype=dtype)
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

    def ours(self, config: KernelConfig) -> Any:
        from convmesh.kernels.tuned import conv_launch

        shape = self.job.shape
        if self.job.part == "forward":
            return conv_launch.convolve(self.x, self.weight, None, shape, config)
        if self.job.part == "input":
            return conv_launch.input_gradient(self.grad, self.weight, shape, config)
        return conv_launch.weight_gradient(self.grad, self.x, shape, config)[0]


def checked(job: Job) -> dict[str, Any]:
    """Compile every configuration of a job and compare it with float32."""
    import torch

    torch.backends.cudnn.allow_tf32 = False
    operands = Operands(job)
    with torch.no_grad():
        expected = Operands(job).single().torchs()
        norm = expected.norm().item()
        errors: list[Any] = []
        for config in job.configs(torch.cuda.get_device_properties(0).multi_processor_count):
            try:
                got = operands.ours(config)
                errors.append((got.float() - expected).norm().item() / norm)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}"[:160])
        theirs = (operands.torchs().float() - expected).norm().item() / norm
    torch.cuda.empty_cache()
    return {"errors": errors, "error_cudnn": theirs}


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds of a call, the median."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=4, rep=16, return_mode="median"))


def measured(job: Job, errors: list[Any], processors: int) -> dict[str, Any]:
    """cuDNN in both formats and the right configurations, in milliseconds."""
    import torch

    torch.backends.cudnn.allow_tf32 = True
    operands = Operands(job)
    found = []
    with torch.no_grad():
        last = timed(operands.torchs)
        for config, error in zip(job.configs(processors), errors, strict=True):
            if isinstance(error, float) and error <= WORST[job.dtype]:
                found.append((timed(lambda c=config: operands.ours(c)), dataclasses.astuple(config), error))  # type: ignore[misc]
        plain = timed(operands.plain().torchs)
    return {"last": last, "plain": plain, "ours": sorted(found)}


def jobs(words: list[str]) -> Iterator[Job]:
    for name, shapes in SHAPES.items():
        if not words or name in words:
            yield from (Job(shape, part) for shape in shapes for part in PARTS if name in OF_INPUT or part != "input")


def floor_ms(shape: ConvShape) -> float:
    """The least time of one phase in bf16: 4.3 TB/s, 780 TFLOP/s."""
    return max(shape.bytes_moved(2) / 4.3e12, shape.flops / 780e12) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs="+")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--compile-seconds", type=float, default=150)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    if options.table:
        _write_table([row for file in options.table for row in json.loads(file.read_text())["rows"]], options.table[-1])
        return
    begin = time.monotonic()
    errors: dict[Job, dict[str, Any]] = {}
    pool = ProcessPoolExecutor(options.processes, mp_context=get_context("spawn"))
    waiting = {pool.submit(checked, job): job for job in jobs(options.only)}
    try:
        for done in as_completed(waiting, timeout=options.compile_seconds):
            errors[waiting[done]] = done.result()
    except OutOfTime:
        print(f"{len(waiting) - len(errors)} jobs were not compiled in time", flush=True)
    for process in list(pool._processes.values()):
        process.kill()
    print(f"compiled {len(errors)} jobs in {time.monotonic() - begin:.0f} s", flush=True)
    _time_all(errors, options.out, begin + options.seconds)


def _time_all(errors: dict[Job, dict[str, Any]], out: Path, end: float) -> None:
    import torch

    processors = torch.cuda.get_device_properties(0).multi_processor_count
    rows = []
    for job, found in errors.items():
        if time.monotonic() > end:
            print("out of time", flush=True)
            break
        row = {"shape": str(job.shape), "part": job.part, "floor": floor_ms(job.shape), **found}
        row |= measured(job, found["errors"], processors)
        rows.append(row)
        best = row["ours"][0] if row["ours"] else (float("nan"), None, None)
        wrong = [e for e in found["errors"] if not isinstance(e, float) or e > WORST[job.dtype]]
        print(
            f"{row['shape']:60s} {job.part:8s} floor {row['floor']:.3f} cudnn {row['last']:.3f} {row['plain']:.3f} "
            f"ours {best[0]:.3f} {best[1]} wrong {len(wrong)}/{len(found['errors'])} {wrong[:1]}",
            flush=True,
        )
        out.write_text(json.dumps({"about": _about(), "rows": rows}))
        torch.cuda.empty_cache()


def _about() -> dict[str, str]:
    import datetime

    import torch
    import triton

    return {
        "date": str(datetime.date.today()),
        "device": torch.cuda.get_device_name(),
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
    table = write_table(ConvTable(device, best_rows(measurements)), about)
    folder = Path("src/convmesh/kernels/tuned/tables")
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(table)


if __name__ == "__main__":
    main()
