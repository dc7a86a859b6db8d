"""Energy, carbon dioxide and price of a step: devices, links, hosts, switches and the building."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial

from convmesh.oracle.pricing.assumptions import Assumptions
from convmesh.oracle.pricing.estimate import Basis, Estimate
from convmesh.oracle.simulate.step import Scheduled
from convmesh.plans.program import Program
from convmesh.plans.steps import Transfer
from convmesh.system import Device, Figure, System

LEVEL_ARITHMETIC = 0.9
LEVEL_MEMORY = 0.7
"""Share of the range from idle to busy power that a device draws while arithmetic, or memory, is the bottleneck. Chosen
by eye from one H200: of eight networks, the five that kept it busy drew 0.68 to 0.93 of it by NVML; the other three
waited for the host and are left out. Not tested on other devices."""
LEVEL_WAITING = 0.2
"""The same while it waits for transfers, which its own kernels move; a guess."""
SPREAD_LEVEL = 0.15

JOULES_PER_KWH = 3.6e6
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Joules of one step over all ranks, by consumer; the step takes `seconds`."""

    devices: Estimate
    links: Estimate
    hosts: Estimate
    network: Estimate
    facility: Estimate
    """Cooling and losses in the building."""
    seconds: float
    grams_co2_per_kwh: float
    dollars_per_hour: float | None = None
    """Price of all nodes together, where it is public."""

    @property
    def parts(self) -> dict[str, Estimate]:
        return {f.name: part for f in fields(self) if isinstance(part := getattr(self, f.name), Estimate)}

    @property
    def joules(self) -> Estimate:
        return Estimate.total(self.parts.values())

    @property
    def watts(self) -> float:
        """On average over the step."""
        return self.joules.value / self.seconds if self.seconds else 0.0

    @property
    def grams_co2(self) -> Estimate:
        return self.joules.scaled(self.grams_co2_per_kwh / JOULES_PER_KWH)

    @property
    def dollars(self) -> float | None:
        """The price of the nodes for one step."""
        return None if self.dollars_per_hour is None else self.dollars_per_hour * self.seconds / SECONDS_PER_HOUR


def energy_of(
    scheduled: Scheduled, system: System, programs: Mapping[int, Program], assumptions: Assumptions | None = None
) -> Energy:
    """Energy of one step, in which every rank takes as long as the slowest; `programs` stand for those of all ranks."""
    mesh, power = next(iter(programs.values())).mesh, system.power
    per_node = (assumptions or Assumptions()).ranks_per_node or int(system.node.devices)
    nodes, step = mesh.size / per_node, scheduled.step
    devices = _device(scheduled, system, arithmetic_share(programs, system.device)).scaled(mesh.size)
    links = _links(programs, system, per_node).scaled(mesh.size)
    hosts, network = (_drawn(watts, step).scaled(nodes) for watts in (power.watts_host, power.watts_network))
    machine = Estimate.total((devices, links, hosts, network))
    hourly = system.node.dollars_per_hour
    return Energy(
        devices=devices,
        links=links,
        hosts=hosts,
        network=network,
        facility=machine.scaled(float(power.facility_overhead) - 1),
        seconds=step.value,
        grams_co2_per_kwh=float(power.grams_co2_per_kwh),
        dollars_per_hour=None if hourly is None else float(hourly) * math.ceil(nodes),
    )


def arithmetic_share(programs: Mapping[int, Program], device: Device) -> float:
    """Share of computing time in which arithmetic is the bottleneck, by the roofline."""
    memory_rate = float(device.bytes_per_second_memory) * float(device.fraction_memory)
    rate = cache(partial(_rate, device))
    by_arithmetic = by_memory = 0.0
    for program in programs.values():
        for work in program.works():
            arithmetic, memory = work.flops / rate(work.dtype), work.bytes_moved / memory_rate
            if arithmetic > memory:
                by_arithmetic += arithmetic
            else:
                by_memory += memory
    total = by_arithmetic + by_memory
    return by_arithmetic / total if total else 0.0


def _rate(device: Device, dtype: str) -> float:
    tensor = dtype in device.tensor_flops_per_second
    known = tensor or dtype in device.flops_per_second
    fraction = device.fraction_tensor if tensor and device.fraction_tensor is not None else device.fraction_vector
    return float(device.peak(dtype if known else "float32")) * float(fraction)


def _device(scheduled: Scheduled, system: System, arithmetic: float) -> Estimate:
    """Joules of one device in a step: idle power throughout, and more while it works."""
    power = system.power
    more = float(power.watts_device_busy) - float(power.watts_device_idle)
    computing = more * (arithmetic * LEVEL_ARITHMETIC + (1 - arithmetic) * LEVEL_MEMORY)
    parts = (
        _drawn(power.watts_device_idle, scheduled.step),
        _uncertain(scheduled.compute.scaled(computing)),
        _uncertain(scheduled.update.scaled(more * LEVEL_MEMORY)),
        _uncertain(scheduled.exposed.scaled(more * LEVEL_WAITING)),
    )
    return Estimate.total(parts)


def _uncertain(estimate: Estimate) -> Estimate:
    """The estimate, widened by the uncertainty about a device's power."""
    low, high = estimate.low * (1 - SPREAD_LEVEL), estimate.high * (1 + SPREAD_LEVEL)
    return Estimate(estimate.value, low, high, "model" if estimate.basis == "measured" else estimate.basis)


def _drawn(watts: Figure, seconds: Estimate) -> Estimate:
    """A constant power over `seconds`, with the spread of its figure."""
    low, high = watts.spread or (watts.value, watts.value)
    basis: Basis = "guess" if watts.origin == "guess" else "model"
    return Estimate(watts.value * seconds.value, low * seconds.low, high * seconds.high, basis)


def _links(programs: Mapping[int, Program], system: System, per_node: int) -> Estimate:
    """Joules to move one rank's bytes, averaged over the evaluated ranks: bits by medium."""
    bits: Counter[str] = Counter()
    for rank, program in programs.items():
        for transfer, times in program.transfers_with_update():
            for medium, share in _media(transfer, rank, program, system, per_node):
                bits[medium] += 8 * times * transfer.bytes_sent * share  # type: ignore[assignment]
    per_bit = system.power.joules_per_bit
    return Estimate.total(
        _drawn(per_bit[medium], Estimate.exactly(count / len(programs)))
        for medium, count in bits.items()
        if medium in per_bit
    )


def _media(
    transfer: Transfer, rank: int, program: Program, system: System, per_node: int
) -> Iterator[tuple[str, float]]:
    """The media that a message crosses, each with the share of the bytes that crosses it.

    A collective passes bytes around a ring; one of its steps in each block leaves the block.
    """
    if transfer.peer is not None:
        level = system.level_between(rank, transfer.peer, per_node)
        yield from () if level is None else ((level.medium, 1.0),)
        return
    spans = system.spans(program.mesh, transfer.axes, per_node)
    ranks, inside = program.mesh.extent(transfer.axes), 1
    for level in system.links:
        blocks = spans[level.name].blocks
        # Steps of the ring between the blocks that this level joins, without those that leave the level.
        joined = ranks // inside if blocks > 1 else 0
        left = ranks // (inside * blocks) if inside * blocks < ranks else 0
        inside *= blocks
        if joined > left:
            yield level.medium, (joined - left) / ranks
