"""What devices and processors of this machine really draw: their own counters, or nothing where there are none."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

POWERCAP = Path("/sys/class/powercap")


class EnergyCounter(Protocol):
    """Joules since some moment in the past."""

    name: str

    def joules(self) -> float: ...

    def between(self, begin: float, end: float) -> float:
        """From one reading to a later one."""


class NvmlCounter:
    """One GPU's energy counter, which ticks about ten times a second: use it for a second at least."""

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
    """One processor's energy counter (RAPL, through powercap); it starts again at its limit."""

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
    """Energy by counter, and time, between two readings; filled when the window is closed."""

    joules: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def joules_total(self) -> float | None:
        """None where nothing counts."""
        return sum(self.joules.values()) if self.joules else None


class EnergyMeter:
    """Reads its counters around a block. Without any it is a null object: blocks run, and nothing is known."""

    def __init__(self, counters: Sequence[EnergyCounter] = ()) -> None:
        self.counters = tuple(counters)

    @contextmanager
    def window(self) -> Iterator[EnergyWindow]:
        """`with meter.window() as used: …`, then `used.joules`. Wait for the device inside the block."""
        found, begin = EnergyWindow(), time.perf_counter()
        before = [counter.joules() for counter in self.counters]
        yield found
        after = [counter.joules() for counter in self.counters]
        found.seconds = time.perf_counter() - begin
        for counter, *readings in zip(self.counters, before, after, strict=True):
            found.joules[counter.name] = found.joules.get(counter.name, 0.0) + counter.between(*readings)


def energy_meter(gpus: Sequence[int] | None = None) -> EnergyMeter:
    """Of all counters that can be read here: those of `gpus` (default: all), and of the processors."""
    return EnergyMeter([*gpu_counters(gpus), *processor_counters()])


def gpu_counters(gpus: Sequence[int] | None = None) -> list[EnergyCounter]:
    """Of GPUs by their number; those without a counter are left out."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        _check(library.nvmlInit_v2())
        count = ctypes.c_uint()
        _check(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    except OSError:
        return []
    return _readable(lambda index: NvmlCounter(library, index), range(count.value) if gpus is None else gpus)


def processor_counters(folder: Path = POWERCAP) -> list[EnergyCounter]:
    """Of whole packages; parts of them would count twice. Most systems let only root read them."""
    return _readable(RaplCounter, sorted(folder.glob("intel-rapl:?")))


def _readable(make: Any, items: Any) -> list[EnergyCounter]:
    found: list[EnergyCounter] = []
    for item in items:
        try:
            found.append(make(item))
        except (OSError, ValueError):
            continue
    return found


def _check(status: int) -> None:
    """An OSError for everything that NVML refuses."""
    if status:
        raise OSError(f"NVML answered {status}")
