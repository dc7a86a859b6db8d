"""Points in time of a step: on the host if it computes itself, on the device's stream if not."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class StampClock(Protocol):
    """Gives stamps while a step runs, and their times afterwards. Times are those of `time.perf_counter`."""

    def stamp(self) -> Any: ...

    def begin(self) -> None:
        """Before the first stamp of a step."""

    def settle(self) -> None:
        """After the last stamp of a step, before `seconds`."""

    def seconds(self, stamp: Any) -> float: ...


class HostClock:
    """The host computes: its own clock."""

    stamp = staticmethod(time.perf_counter)

    def begin(self) -> None: ...

    def settle(self) -> None: ...

    def seconds(self, stamp: float) -> float:
        return stamp


class DeviceClock:
    """Events on the current stream, so that nothing waits until the step is over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.begin()

    def stamp(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        self._at, self._first = time.perf_counter(), self.stamp()

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, stamp: Any) -> float:
        return self._at + float(self._first.elapsed_time(stamp)) / 1e3


def clock_for(device: torch.device) -> StampClock:
    """The clock for work on a device."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
