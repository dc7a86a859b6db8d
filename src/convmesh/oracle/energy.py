"""Energy and carbon dioxide of a step."""

from __future__ import annotations

from convmesh.oracle.estimate import Estimate
from convmesh.oracle.schedule import Scheduled
from convmesh.system import System


def joules_of(scheduled: Scheduled, system: System, ranks: int) -> Estimate:
    """Of all devices, their hosts and switches, and the building around them, for one step."""
    power = system.power
    busy = scheduled.compute + scheduled.update
    idle_watts = float(power.watts_device_idle)
    devices = busy.scaled(float(power.watts_device_busy) - idle_watts) + scheduled.step.scaled(idle_watts)
    around = (float(power.watts_host) + float(power.watts_network)) / float(system.node.devices)
    return (devices + scheduled.step.scaled(around)).scaled(ranks * float(power.facility_overhead))
