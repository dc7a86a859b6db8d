"""Operators on samples of 2^31 elements and more on one GPU: torch's own, and convolutions in slabs.

python -m benchmarks.slabs [--out FILE.jsonl] [--search] [--only WORD ...]

Convolutions: milliseconds of each phase whole and in slabs, in bf16 and in both memory formats. All other operators:
milliseconds, and what eight times an eighth of the sample takes. `--search` lets cuDNN search for the fastest kernel
(`torch.backends.cudnn.benchmark`), which may take minutes a shape. `--dry` runs tiny volumes on a processor, without
times.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.gpu_timing import milliseconds_of
from convmesh.kernels import slab_conv
from convmesh.kernels.conv_params import ConvParams
from convmesh.kernels.local_conv import convolution, convolution_backward

MILLISECONDS = 500.0
FORMATS = {"channels-last": torch.channels_last_3d, "plain": torch.contiguous_format}
aten = torch.ops.aten


class Case(NamedTuple):
    """A convolution of one cube, whose output is as large or a stride-th of it."""

    name: str
    channels: int
    filters: int
    extent: int
    kernel: int = 3
    stride: int = 1

    @property
    def params(self) -> ConvParams:
        return ConvParams((self.stride,) * 3, (self.kernel // 2,) * 3, (1,) * 3, 1)


CASES = (
    Case("cosmoflow", 4, 32, 512),
    Case("first", 4, 16, 512),
    Case("second", 16, 32, 512),
    Case("down", 32, 64, 512, 2, 2),
    Case("joined", 192, 64, 256),
    Case("head", 32, 4, 512, 1),
)
CHANNELS, EXTENT = 32, 512
OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max_pool": lambda x: F.max_pool3d(x, 2),
    "avg_pool": lambda x: F.avg_pool3d(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "instance_norm": F.instance_norm,
    "group_norm": lambda x: F.group_norm(x, 8),
    "leaky_relu": F.leaky_relu,
    "cat": lambda x: torch.cat([x, x], 1),
    "nearest": lambda x: F.interpolate(x[:, :, ::2, ::2, ::2], scale_factor=2),
    "trilinear": lambda x: F.interpolate(x[:, :, ::2, ::2, ::2], scale_factor=2, mode="trilinear"),
    "cross_entropy": lambda x: F.cross_entropy(x, x.new_zeros(x.shape[:1] + x.shape[2:], dtype=torch.long)),
}


def convolutions(case: Case, form: str, device: str, scale: int) -> Iterator[tuple[str, float, float]]:
    """Of each phase its name, and milliseconds whole and in slabs."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    options: Any = {"dtype": dtype, "device": device}
    shape = (1, case.channels, *[case.extent // scale] * 3)
    x = torch.randn(shape, **options).contiguous(memory_format=FORMATS[form])
    weight = torch.randn(case.filters, case.channels, *[case.kernel] * 3, **options)
    dy = torch.randn_like(convolution(x, weight, None, case.params, "cuda"))

    def whole(wants_x: bool, wants_w: bool) -> Any:
        wanted = [wants_x, wants_w, False]
        return aten.convolution_backward(dy, x, weight, None, *case.params.of_aten, wanted)

    def in_slabs(*wanted: bool) -> Any:
        return convolution_backward(dy, x, weight, case.params, (wanted[0], wanted[1]), "cuda")

    phases: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "forward": (
            lambda: aten.convolution(x, weight, None, *case.params.of_aten),
            lambda: convolution(x, weight, None, case.params, "cuda"),
        ),
        "input": (lambda: whole(True, False), lambda: in_slabs(True, False)),
        "weight": (lambda: whole(False, True), lambda: in_slabs(False, True)),
    }
    for phase, (one, other) in phases.items():
        slabs = timed(other, device)  # first: a whole one may take minutes, or fail
        yield phase, timed(one, device), slabs


def other(name: str, form: str, device: str, scale: int) -> tuple[float, float]:
    """Milliseconds forward and backward for the whole sample, and eight times those for an eighth of it."""
    times = []
    for extent in (EXTENT // scale, EXTENT // scale // 2):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        x = torch.randn(1, CHANNELS, *[extent] * 3, dtype=dtype, device=device)
        x = x.contiguous(memory_format=FORMATS[form]).requires_grad_()
        times.append(timed(lambda x=x: torch.autograd.grad(OTHERS[name](x).sum(), x), device))  # type: ignore[misc]
    return times[0], 8 * times[1]


def timed(call: Callable[[], Any], device: str) -> float:
    """Milliseconds; nan where memory is too small, and without a GPU."""
    try:
        if device != "cuda":
            call()
            return float("nan")
        return milliseconds_of(call, MILLISECONDS)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return float("nan")


def measured(only: list[str], device: str, scale: int) -> Iterator[dict[str, Any]]:
    for form in FORMATS:
        for case in CASES:
            if not only or case.name in only:
                for phase, whole, slabs in convolutions(case, form, device, scale):
                    yield {"name": case.name, "format": form, "phase": phase, "whole_ms": whole, "slabs_ms": slabs}
        for name in OTHERS:
            if not only or name in only:
                whole, expected = other(name, form, device, scale)
                yield {"name": name, "format": form, "phase": "both", "whole_ms": whole, "expected_ms": expected}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("slabs.jsonl"))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = args.search
    if args.dry:
        slab_conv.CLIFF, slab_conv.SLAB = 1 << 12, 1 << 10
    with args.out.open("a") as out:
        for row in measured(args.only, "cpu" if args.dry else "cuda", 32 if args.dry else 1):
            print(row, flush=True)
            out.write(json.dumps(row) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
