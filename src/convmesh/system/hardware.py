"""Hardware of a cluster: devices in nodes, joined by levels of links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from convmesh.errors import UnknownNameError
from convmesh.system.figure import COUNT, FRACTION, Figure, Rule, Text

FORMATS = ("float64", "float32", "tf32", "float16", "bfloat16")
"""Number formats for which devices have a peak rate."""

TORCH_TYPES = ("cuda", "cpu")
"""What torch calls devices: accelerators, and processors whose cores compute themselves."""

MEDIA = ("nvlink", "pcie", "network")
"""What a level of links is made of; `pcie` stands for every bus of a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device that a rank drives: one accelerator, or one CPU."""

    kind: str
    torch_type: Annotated[str, Text(TORCH_TYPES, default="cuda")] = "cuda"
    """Whose kernels run: an accelerator's, or a processor's."""
    processors: Annotated[Figure, COUNT]
    """Multiprocessors or cores that share the tiles of an operator."""
    flops_per_second: Annotated[Mapping[str, Figure], Rule("FLOP/s", keys=FORMATS)]
    """Peak of the vector units by number format."""
    tensor_flops_per_second: Annotated[Mapping[str, Figure], Rule("FLOP/s", keys=FORMATS, optional=True)] = field(
        default_factory=dict
    )
    """Peak of the tensor cores, without sparsity."""
    fraction_vector: Annotated[Figure, FRACTION]
    """Fraction of the vector units' peak that large convolutions reach."""
    fraction_tensor: Annotated[Figure | None, Rule(most=1, optional=True)] = None
    bytes_memory: Annotated[Figure, Rule("B")]
    bytes_per_second_memory: Annotated[Figure, Rule("B/s")]
    fraction_memory: Annotated[Figure, FRACTION]
    """Fraction of the memory's peak that streaming operators reach."""
    seconds_launch: Annotated[Figure, Rule("s")]
    """Time from one short kernel to the next."""

    def peak(self, number_format: str, *, tensor: bool = True) -> Figure:
        """The highest peak rate for a number format, with tensor cores if they may be used."""
        tables = (self.tensor_flops_per_second if tensor else {}, self.flops_per_second)
        peaks = [table[number_format] for table in tables if number_format in table]
        if not peaks:
            raise UnknownNameError.of("number_format", number_format, {name for table in tables for name in table})
        return max(peaks, key=float)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNode:
    """A host and its devices."""

    devices: Annotated[Figure, COUNT]
    count: Annotated[Figure | None, Rule(least=1, whole=True, optional=True)] = None
    """Number of nodes, for a machine that exists."""
    dollars_per_hour: Annotated[Figure | None, Rule("$/h", optional=True)] = None
    cores: Annotated[Figure | None, Rule(least=1, whole=True, optional=True)] = None
    """If devices are one-thread processes on a host: how many run at once. Further ranks take turns."""

    def turns(self, ranks: int) -> float:
        """Factor by which computation slows down because ranks of one node outnumber its cores."""
        return 1.0 if self.cores is None else max(1.0, min(ranks, int(self.devices)) / self.cores.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLevel:
    """One level of links: it joins blocks of the level inside it into blocks of `devices`."""

    name: str
    medium: Annotated[str, Text(MEDIA)]
    devices: Annotated[Figure | None, Rule(least=2, whole=True, optional=True)] = None
    """Devices in one block; the outermost level may omit it and join any number."""
    bytes_per_second: Annotated[Figure, Rule("B/s")]
    """Bandwidth of one port in one direction."""
    bytes_per_second_pair: Annotated[Figure | None, Rule("B/s", optional=True)] = None
    """Bandwidth between two devices, if less than a port's."""
    shared_by: Annotated[Figure, COUNT]
    """Devices that share a port."""
    oversubscription: Annotated[Figure, Rule(least=1)]
    """Ratio of the ports' total bandwidth to the level's own."""
    seconds_latency: Annotated[Figure, Rule("s")]
    """Latency of a message of a few bytes between two devices."""

    @property
    def bytes_per_second_each(self) -> float:
        """Bandwidth of one device in one direction while all send through this level."""
        return self.bytes_per_second.value / self.shared_by.value / self.oversubscription.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Power draw of a node, and its effects outside."""

    watts_device_idle: Annotated[Figure, Rule("W")]
    watts_device_busy: Annotated[Figure, Rule("W")]
    watts_host: Annotated[Figure, Rule("W")]
    """Power of a node without its devices."""
    watts_network: Annotated[Figure, Rule("W")]
    """A node's share of the switches."""
    joules_per_bit: Annotated[Mapping[str, Figure], Rule("J/bit", keys=MEDIA)]
    facility_overhead: Annotated[Figure, Rule(least=1)]
    """Power of the building for each watt of the machine."""
    grams_co2_per_kwh: Annotated[Figure, Rule("g/kWh")]
