"""This machine as a system: measured figures, and figures marked as guesses for the rest."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

from convmesh.measure.device_figures import measured
from convmesh.measure.machine import Machine
from convmesh.system import Collectives, Device, Figure, HostNode, LinkLevel, Method, Power, System
from convmesh.system.folder import LOCAL
from convmesh.system.transfer_table import TransferTable

T = TypeVar("T")

_LIKE = "dgx-a100"
"""The system assumed around a GPU that no shipped system has."""

_GUESSED = {
    "network": Figure(2.0, "W", "guess", "a port of an office switch"),
    "host": Figure(60.0, "W", "guess", "mainboard, memory and fans of a small server"),
    "idle": Figure(2.0, "W", "guess", "a core of a server processor that draws 100 W at rest with 48 cores"),
    "busy": Figure(6.0, "W", "guess", "a core of a server processor that draws 300 W under load with 48 cores"),
    "latency": Figure(50e-6, "s", "guess", "a message of Gloo between processes of one host takes 20 to 100 us"),
    "bandwidth": Figure(2e9, "B/s", "guess", "Gloo copies through TCP on one host at 1 to 4 GB/s"),
    "start": Figure(20e-6, "s", "guess", "time that Gloo needs before the first message"),
    "one": Figure(1.0, "", "guess", "every process has its own connections"),
    "share": Figure(0.8, "", "guess", "fraction of a message's bandwidth that collectives of large tensors reach"),
}
"""Figures of a host without GPUs that are not measured."""


def local_system(machine: Machine, device: Device) -> System:
    """The system with guessed links and power; `with_links` replaces the links by measured ones."""
    return _gpu_system(machine, device) if machine.gpus else _cpu_system(machine, device)


def _cpu_system(machine: Machine, device: Device) -> System:
    """One-thread ranks on one host; if they outnumber the cores, they take turns."""
    places = measured(machine.places, "", f"ranks that may be placed on this host; {machine.cores} run at once")
    defaults = System.load(_LIKE).power
    return System(
        LOCAL,
        f"This machine: {machine.cores} cores of {machine.kind}, one thread per rank",
        device,
        HostNode(devices=places, cores=measured(machine.cores, "", "cores that this process may use")),
        (_host_link(places),),
        _gloo(),
        Power(
            watts_device_idle=_GUESSED["idle"],
            watts_device_busy=_GUESSED["busy"],
            watts_host=_GUESSED["host"],
            watts_network=_GUESSED["network"],
            joules_per_bit=defaults.joules_per_bit,
            facility_overhead=defaults.facility_overhead,
            grams_co2_per_kwh=defaults.grams_co2_per_kwh,
        ),
    )


def _host_link(places: Figure) -> LinkLevel:
    return LinkLevel(
        name="host",
        medium="pcie",
        devices=places,
        bytes_per_second=_GUESSED["bandwidth"],
        shared_by=_GUESSED["one"],
        oversubscription=_GUESSED["one"],
        seconds_latency=_GUESSED["latency"],
    )


def _gloo() -> Collectives:
    ring = Method(
        name="ring-simple",
        algorithm="ring",
        protocol="simple",
        fraction_bandwidth=_GUESSED["share"],
        seconds_start=_GUESSED["start"],
        seconds_step={"pcie": _GUESSED["latency"], "network": _GUESSED["latency"]},
    )
    return Collectives(library="Gloo", methods=(ring,))


def _gpu_system(machine: Machine, device: Device) -> System:
    base = System.load(_nearest(machine.kind))
    gpus = measured(machine.gpus, "", "reported by the driver")
    inner = [_inherited(replace(base.links[0], devices=gpus), base)] if machine.gpus > 1 else []
    return System(
        LOCAL,
        f"This machine: {machine.gpus} x {machine.kind}",
        device,
        HostNode(devices=gpus),
        (*inner, _inherited(replace(base.links[-1], devices=None), base)),
        replace(base.collectives, methods=tuple(_inherited(method, base) for method in base.collectives.methods)),
        _inherited(base.power, base),
    )


def _nearest(kind: str) -> str:
    """The shipped system whose device has this GPU's name."""
    for name in System.names():
        if name != LOCAL and System.load(name).device.kind.split("-")[0] in kind.replace("-", " ").split():
            return name
    return _LIKE


def _inherited(value: T, base: System) -> T:
    """The same value with its figures marked as guesses; figures of this machine stay as they are."""
    changed = {
        f.name: _as_guess(getattr(value, f.name), base.name)
        for f in fields(value)  # type: ignore[arg-type]
    }
    return replace(value, **changed)  # type: ignore[type-var]


def _as_guess(value: object, name: str) -> object:
    if isinstance(value, dict):
        return {key: _as_guess(figure, name) for key, figure in value.items()}
    if not isinstance(value, Figure) or value.origin == "measured":
        return value
    source = f"inherited from {name} ({value.origin}: {value.source})"
    return replace(value, origin="guess", source=source, inherited=name)


def with_links(system: System, table: TransferTable) -> System:
    """The system with this table, and with the latency and bandwidth that its messages between two ranks show."""
    curves = [c for c in table.curves if c.carrier == "neighbour" and c.ranks == 2]
    if not curves:
        return replace(system, transfers=table)
    alone = min(curves, key=lambda curve: curve.active)
    what = f"messages of {table.backend} between two ranks"
    level = replace(
        system.links[0],
        seconds_latency=measured(alone.seconds_floor, "s", f"small {what}"),
        bytes_per_second=measured(1 / alone.seconds_per_byte, "B/s", f"large {what}"),
    )
    return replace(system, links=(level, *system.links[1:]), transfers=table)
