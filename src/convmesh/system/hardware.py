"""What a cluster is made of: devices in nodes, joined by levels of links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from convmesh.errors import UnknownNameError
from convmesh.system.figure import COUNT, FRACTION, Figure, Rule, Text

FORMATS = ("float64", "float32", "tf32", "float16", "bfloat16")
"""Number formats that devices have a peak rate for."""

MEDIA = ("nvlink", "pcie", "network")
"""What a level of links is made of; `pcie` stands for every bus of a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one CPU: what a rank drives."""

    kind: str
    processors: Annotated[Figure, COUNT]
    """Multiprocessors or cores that the tiles of an operator are dealt out to."""
    flops_per_second: Annotated[Mapping[str, Figure], Rule("FLOP/s", keys=FORMATS)]
    """Peak of the vector units by number format."""
    tensor_flops_per_second: Annotated[Mapping[str, Figure], Rule("FLOP/s", keys=FORMATS, optional=True)] = field(
        default_factory=dict
    )
    """Peak of the tensor cores, without sparsity."""
    fraction_vector: Annotated[Figure, FRACTION]
    """Of the vector units' peak, what large convolutions reach."""
    fraction_tensor: Annotated[Figure | None, Rule(most=1, optional=True)] = None
    bytes_memory: Annotated[Figure, Rule("B")]
    bytes_per_second_memory: Annotated[Figure, Rule("B/s")]
    fraction_memory: Annotated[Figure, FRACTION]
    """Of the memory's peak, what streaming operators reach."""
    seconds_launch: Annotated[Figure, Rule("s")]
    """From one short kernel to the next."""

    def peak(self, number_format: str, *, tensor: bool = True) -> Figure:
        """The highest peak rate for a number format, with tensor cores if they may be used."""
        tables = (self.tensor_flops_per_second if tensor else {}, self.flops_per_second)
        found = [table[number_format] for table in tables if number_format in table]
        if not found:
            raise UnknownNameError.of("number_format", number_format, {name for table in tables for name in table})
        return max(found, key=float)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNode:
    """A host and its devices."""

    devices: Annotated[Figure, COUNT]
    count: Annotated[Figure | None, Rule(least=1, whole=True, optional=True)] = None
    """Nodes that there are, where the machine is one that exists."""
    dollars_per_hour: Annotated[Figure | None, Rule("$/h", optional=True)] = None
    cores: Annotated[Figure | None, Rule(least=1, whole=True, optional=True)] = None
    """Where devices are processes of one thread on a host: how many of them run at once. More ranks take turns."""

    def turns(self, ranks: int) -> float:
        """How many times as long ranks on one node compute, because there are fewer cores than ranks."""
        return 1.0 if self.cores is None else max(1.0, min(ranks, int(self.devices)) / self.cores.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLevel:
    """One level of links: it joins blocks of the level inside it into blocks of `devices`."""

    name: str
    medium: Annotated[str, Text(MEDIA)]
    devices: Annotated[Figure | None, Rule(least=2, whole=True, optional=True)] = None
    """Devices that one block has; the outermost level may leave it out and join any number."""
    bytes_per_second: Annotated[Figure, Rule("B/s")]
    """Of one port in one direction."""
    bytes_per_second_pair: Annotated[Figure | None, Rule("B/s", optional=True)] = None
    """Between two devices, where that is less than a port has."""
    shared_by: Annotated[Figure, COUNT]
    """Devices that share a port."""
    oversubscription: Annotated[Figure, Rule(least=1)]
    """How often the ports' bandwidth would fit into the level's own."""
    seconds_latency: Annotated[Figure, Rule("s")]
    """Of a message of a few bytes between two devices."""

    @property
    def bytes_per_second_each(self) -> float:
        """What one device has in one direction while all of them send through this level."""
        return self.bytes_per_second.value / self.shared_by.value / self.oversubscription.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """What a node draws, and what that does outside."""

    watts_device_idle: Annotated[Figure, Rule("W")]
    watts_device_busy: Annotated[Figure, Rule("W")]
    watts_host: Annotated[Figure, Rule("W")]
    """Of a node without its devices."""
    watts_network: Annotated[Figure, Rule("W")]
    """A node's share of the switches."""
    joules_per_bit: Annotated[Mapping[str, Figure], Rule("J/bit", keys=MEDIA)]
    facility_overhead: Annotated[Figure, Rule(least=1)]
    """Power of the building for each watt of the machine."""
    grams_co2_per_kwh: Annotated[Figure, Rule("g/kWh")]
