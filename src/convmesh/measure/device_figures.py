"""Measures one device: peak rates, memory bandwidth and launch time, each with the operator that shows it best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch
import torch.nn.functional as F

from convmesh.measure.clock import TimedCall, one_thread, timed
from convmesh.measure.machine import Machine
from convmesh.system import Device, Figure
from convmesh.system.units import amount, shown

_CPU_FORMATS = ("float64", "float32", "bfloat16")
_GPU_FORMATS = ("float64", "float32", "tf32", "float16", "bfloat16")
_TENSOR_FORMATS = ("tf32", "float16", "bfloat16")

Progress = Callable[[str], None]
"""Receives a message before each measurement."""


def silent(text: str) -> None:
    """Ignore progress messages."""
    del text


@dataclass(frozen=True, slots=True)
class ProbeSizes:
    """Sizes of the operators that show a device's peaks."""

    matrix: int
    """Rows of a square matrix."""
    channels: int
    extent: int
    samples: int
    elements: int
    """Length of an array far larger than every cache."""

    @classmethod
    def of(cls, machine: Machine, quick: bool) -> ProbeSizes:
        if machine.gpus:
            return cls(8192, 256, 64, 32, 1 << 28)
        return cls(512, 64, 28, 1, 1 << 22) if quick else cls(1024, 64, 56, 4, 1 << 24)


def measure_device(machine: Machine, quick: bool = False, progress: Progress = silent) -> Device:
    """Measure all figures of the device that a rank drives."""
    with one_thread(), torch.no_grad():
        return _Bench(machine, ProbeSizes.of(machine, quick), 0.02 if quick else 0.3).device(progress)


@dataclass(frozen=True, slots=True)
class _Bench:
    machine: Machine
    sizes: ProbeSizes
    seconds_each: float

    def device(self, progress: Progress) -> Device:
        progress("peak rates of the device")
        peaks = {name: self._matrix_rate(name) for name in (_GPU_FORMATS if self.machine.gpus else _CPU_FORMATS)}
        vector, tensor = self._sorted(peaks)
        progress("memory bandwidth and launch time of the device")
        triad, stream = self._triad(), self._stream()
        best = max(triad.value, stream.value)
        return Device(
            kind=self.machine.kind,
            torch_type="cuda" if self.machine.gpus else "cpu",
            processors=measured(self.machine.processors, "", "processors per rank"),
            flops_per_second=vector,
            tensor_flops_per_second=tensor,
            fraction_vector=self._fraction("float32", vector["float32"]),
            fraction_tensor=self._fraction("bfloat16", tensor["bfloat16"]) if tensor else None,
            bytes_memory=measured(self.machine.bytes_device, "B", self._memory_source()),
            bytes_per_second_memory=triad if triad.value >= stream.value else stream,
            fraction_memory=measured(min(1.0, stream.value / best), "", "relu of a large array against the best"),
            seconds_launch=self._launch(),
        )

    def _sorted(self, peaks: dict[str, Figure]) -> tuple[dict[str, Figure], dict[str, Figure]]:
        """Rates of vector units, and rates of tensor cores."""
        if not self.machine.gpus:
            return peaks, {}
        tensor = {name: peaks[name] for name in _TENSOR_FORMATS}
        return {name: figure for name, figure in peaks.items() if name not in tensor}, tensor

    def _matrix_rate(self, name: str) -> Figure:
        n = self.sizes.matrix
        a = self._array((n, n), name)
        with _tf32(name == "tf32"):
            took = self._time(lambda: a @ a)
        return self._rate(2 * n**3, took, "FLOP/s", f"product of two {n}x{n} matrices")

    def _fraction(self, name: str, peak: Figure) -> Figure:
        """Fraction of the peak that a large 3x3 convolution reaches, forward and backward."""
        s = self.sizes
        shape, weights = (s.samples, s.channels, s.extent, s.extent), (s.channels, s.channels, 3, 3)
        x = self._array(shape, name).contiguous(memory_format=torch.channels_last).requires_grad_()
        w = self._array(weights, name).contiguous(memory_format=torch.channels_last).requires_grad_()

        def step() -> None:
            with torch.enable_grad():
                y = F.conv2d(x, w, padding=1)
            torch.autograd.grad(y, (x, w), y.detach())

        with _tf32(False):
            rate = 3 * 2 * 9 * s.channels * x.numel() / self._time(step).low
        source = f"3x3 convolution of {'x'.join(map(str, shape))} {name}, forward and backward, against the peak"
        return measured(min(1.0, rate / peak.value), "", source)

    def _triad(self) -> Figure:
        a, b, c = (self._array((self.sizes.elements,)) for _ in range(3))
        took = self._time(lambda: torch.add(a, b, alpha=0.5, out=c))
        return self._rate(3 * a.numel() * a.element_size(), took, "B/s", f"triad of {a.numel()} float32")

    def _stream(self) -> Figure:
        a = self._array((self.sizes.elements,))
        out = torch.empty_like(a)
        took = self._time(lambda: torch.clamp_min(a, 0, out=out))
        return self._rate(2 * a.numel() * a.element_size(), took, "B/s", f"relu of {a.numel()} float32")

    def _launch(self) -> Figure:
        """Time from one short operator to the next, over a thousand consecutive ones."""
        a = self._array((16,))
        took = self._time(lambda: [a.add_(1.0) for _ in range(1000)])
        each = TimedCall(took.seconds / 1000, took.low / 1000, took.high / 1000)
        return measured(each.low, "s", "a thousand consecutive additions of 16 numbers", (each.low, each.high))

    def _time(self, call: Callable[[], object]) -> TimedCall:
        return timed(call, self.machine.device, self.seconds_each)

    def _array(self, shape: tuple[int, ...], name: str = "float32") -> torch.Tensor:
        dtype = getattr(torch, "float32" if name == "tf32" else name)
        return torch.full(shape, 0.5, dtype=dtype, device=self.machine.device)

    def _memory_source(self) -> str:
        return "reported by the driver" if self.machine.gpus else "a core's share of the host's memory"

    def _rate(self, amount: float, took: TimedCall, unit: str, what: str) -> Figure:
        """The rate of the fastest calls: a peak is what the device can do."""
        return measured(amount / took.low, unit, what, (amount / took.high, amount / took.low))


def measured(value: float, unit: str, what: str, spread: tuple[float, float] | None = None) -> Figure:
    """A figure measured on this machine today."""
    source = f"{what}; torch {torch.__version__}" if unit not in ("", "B") or spread else what
    ends = None if spread is None else (rounded(spread[0], unit), rounded(spread[1], unit))
    return Figure(rounded(value, unit), unit, "measured", source, date.today().isoformat(), ends)


def rounded(value: float, unit: str) -> float:
    """The value to four digits, more than any measurement is sure of; whole numbers stay as they are."""
    return value if value == int(value) else amount(shown(value, unit), unit)


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid tensor cores for float32 products and convolutions."""
    kinds: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [kind.allow_tf32 for kind in kinds]
    for kind in kinds:
        kind.allow_tf32 = allowed
    try:
        yield
    finally:
        for kind, was in zip(kinds, before, strict=True):
            kind.allow_tf32 = was
