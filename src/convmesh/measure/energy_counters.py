"""Reads the energy counters of this machine's GPUs and CPUs, if it has any."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

POWERCAP = Path("/sys/class/powercap")


class EnergyCounter(Protocol):
    """Counts joules from an arbitrary start."""

    name: str

    def joules(self) -> float: ...

    def between(self, begin: float, end: float) -> float:
        """Joules from one reading to a later one."""


class NvmlCounter:
    """One GPU's energy counter. It ticks about ten times a second: measure for at least a second."""

    def __init__(self, library: Any, index: int) -> None:
        self.name = f"gpu{index}"
        self._library, self._handle = library, ctypes.c_void_p()
        _check(library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self._handle)))
        self.joules()

    def joules(self) -> float:
        millijoules = ctypes.c_ulonglong()
        _check(self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules)))
        return millijoules.value / 1e3

    def between(self, begin: float, end: float) -> float:
        return end - begin


class RaplCounter:
    """One CPU's energy counter (RAPL, through powercap); it wraps around at its limit."""

    def __init__(self, folder: Path) -> None:
        self.name = (folder / "name").read_text().strip()
        self._file = folder / "energy_uj"
        self._limit = float((folder / "max_energy_range_uj").read_text()) / 1e6
        self.joules()

    def joules(self) -> float:
        return float(self._file.read_text()) / 1e6

    def between(self, begin: float, end: float) -> float:
        return end - begin if end >= begin else end - begin + self._limit


@dataclass
class EnergyWindow:
    """Energy by counter, and time, between two readings; filled when the window closes."""

    joules: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def joules_total(self) -> float | None:
        """None without counters."""
        return sum(self.joules.values()) if self.joules else None


class EnergyMeter:
    """Reads its counters around a block. Without counters, blocks still run and the energy is None."""

    def __init__(self, counters: Sequence[EnergyCounter] = (), clock: Callable[[], float] = time.perf_counter) -> None:
        self.counters, self._clock = tuple(counters), clock

    @contextmanager
    def window(self) -> Iterator[EnergyWindow]:
        """`with meter.window() as used: …`, then `used.joules`. Wait for the device inside the block."""
        used, begin = EnergyWindow(), self._clock()
        before = [counter.joules() for counter in self.counters]
        yield used
        used.seconds = self._clock() - begin  # the clock first both times: counters are late by the same
        after = [counter.joules() for counter in self.counters]
        for counter, *readings in zip(self.counters, before, after, strict=True):
            used.joules[counter.name] = used.joules.get(counter.name, 0.0) + counter.between(*readings)


def energy_meter(gpus: Sequence[int] | None = None) -> EnergyMeter:
    """A meter of all readable counters: those of `gpus` (default: all) and of the CPUs."""
    return EnergyMeter([*gpu_counters(gpus), *processor_counters()])


def gpu_counters(gpus: Sequence[int] | None = None) -> list[EnergyCounter]:
    """Counters of GPUs by index; GPUs without one are skipped."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        _check(library.nvmlInit_v2())
        count = ctypes.c_uint()
        _check(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    except OSError:
        return []
    return _readable(lambda index: NvmlCounter(library, index), range(count.value) if gpus is None else gpus)


def processor_counters(folder: Path = POWERCAP) -> list[EnergyCounter]:
    """Counters of whole packages; their parts would count twice. Most systems let only root read them."""
    return _readable(RaplCounter, sorted(folder.glob("intel-rapl:?")))


def _readable(make: Any, items: Any) -> list[EnergyCounter]:
    counters: list[EnergyCounter] = []
    for item in items:
        try:
            counters.append(make(item))
        except (OSError, ValueError):
            continue
    return counters


def _check(status: int) -> None:
    """Raise OSError on any NVML error."""
    if status:
        raise OSError(f"NVML returned status {status}")
