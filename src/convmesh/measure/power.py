"""Measures a device's idle and busy power, if this machine has energy counters."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from convmesh.measure.clock import one_thread, wait_for
from convmesh.measure.device_figures import measured
from convmesh.measure.energy_counters import EnergyMeter, energy_meter
from convmesh.measure.machine import Machine
from convmesh.system import Power

SECONDS = 2.0
"""Counters tick about ten times a second."""


def with_power(power: Power, machine: Machine, meter: EnergyMeter | None = None, seconds: float = SECONDS) -> Power:
    """The figures with measured watts of a device; unchanged without counters."""
    counting = meter or energy_meter([0] if machine.gpus else [])
    if not counting.counters:
        return power
    idle = _watts(counting, machine, seconds, working=False)
    busy = _watts(counting, machine, seconds, working=True)
    names = ", ".join(counter.name for counter in counting.counters)
    share = 1 if machine.gpus else machine.cores  # one rank works on one core; all cores share the idle power
    rest = max(0.01, idle / share)
    return replace(
        power,
        watts_device_idle=measured(rest, "W", f"counters of {names} at rest"),
        watts_device_busy=measured(max(rest, busy - idle + rest), "W", f"counters of {names} under matrix products"),
    )


def _watts(meter: EnergyMeter, machine: Machine, seconds: float, *, working: bool) -> float:
    """Average power over `seconds`."""
    side = 8192 if machine.gpus else 512
    a = torch.ones(side, side, device=machine.device)
    with one_thread(), torch.no_grad(), meter.window() as used:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            if working:
                a @ a
                wait_for(machine.device)
            else:
                time.sleep(seconds / 20)
    return (used.joules_total or 0.0) / used.seconds
