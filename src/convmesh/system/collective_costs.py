"""How a cluster's library runs collectives: algorithms, protocols and the cost of each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from convmesh.system.figure import FRACTION, Figure, Rule, Text
from convmesh.system.hardware import MEDIA

ALGORITHMS = ("ring", "tree", "hierarchical", "nvls")
PROTOCOLS = ("ll", "ll128", "simple")


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One algorithm with one protocol: start latency, latency per step, and the fraction of a link's bandwidth."""

    name: str
    algorithm: Annotated[str, Text(ALGORITHMS)]
    protocol: Annotated[str, Text(PROTOCOLS)]
    fraction_bandwidth: Annotated[Figure, FRACTION]
    seconds_start: Annotated[Figure, Rule("s", zero=True)]
    seconds_step: Annotated[Mapping[str, Figure], Rule("s", keys=MEDIA)]
    """By the medium that a step crosses; the method does not run over other media."""
    bytes_payload_most: Annotated[Figure | None, Rule("B", optional=True)] = None
    """The largest tensor that the method reduces, gathers or broadcasts; any if omitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """The communication library of a system."""

    library: str
    methods: tuple[Method, ...]
    fraction_wire: Annotated[Mapping[str, Figure], Rule(most=1, keys=MEDIA, optional=True)] = field(
        default_factory=dict
    )
    """By medium: the fraction of a link's bandwidth left for data after headers and flow control; 1 by default."""

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Algorithms that some method uses."""
        return tuple(name for name in ALGORITHMS if any(method.algorithm == name for method in self.methods))

    def over(self, medium: str) -> tuple[Method, ...]:
        """The methods that can cross a medium."""
        return tuple(method for method in self.methods if medium in method.seconds_step)
