"""Collectives by algorithm and protocol, and the fastest that a system's library has.

Steps and volumes are those of NCCL's tuner (src/graph/tuning.cc): a library that chooses by that formula runs whichever
method is fastest by it. `bytes_sent` is what the runtime counts: one rank's volume in a ring, or all of a broadcast's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from convmesh.oracle.pricing.collectives.group_shape import Shape
from convmesh.oracle.pricing.collectives.tree_factors import tree_factor
from convmesh.system import Method

PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "reduce": 1}
"""How often data goes around the ring."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A method and the seconds of a collective with it."""

    method: Method
    seconds: float


def fastest(carrier: str, shape: Shape, bytes_sent: int, methods: tuple[Method, ...]) -> Choice:
    """The fastest method that supports the collective, its size and all its media."""
    return min(_choices(carrier, shape, bytes_sent, methods), key=lambda choice: choice.seconds)


def _choices(carrier: str, shape: Shape, bytes_sent: int, methods: tuple[Method, ...]) -> Iterator[Choice]:
    for method in methods:
        if shape.media <= set(method.seconds_step) and _takes(method, payload(carrier, shape.ranks, bytes_sent)):
            seconds = _ALGORITHMS[method.algorithm](carrier, shape, bytes_sent, method)
            if seconds is not None:
                yield Choice(method, seconds)


def _takes(method: Method, bytes_payload: float) -> bool:
    return method.bytes_payload_most is None or bytes_payload <= float(method.bytes_payload_most)


def payload(carrier: str, ranks: int, bytes_sent: float) -> float:
    """Bytes of the whole tensor that is reduced, gathered or broadcast."""
    if carrier in ("broadcast", "reduce"):
        return bytes_sent
    return bytes_sent * ranks / (PASSES[carrier] * (ranks - 1))


def _ring(carrier: str, shape: Shape, bytes_sent: int, method: Method) -> float | None:
    """Every rank passes parts on to the next; a broadcast is cut into slices and does the same."""
    around = sum(edges * _step(method, medium) for medium, edges in shape.ring_edges())
    latency = PASSES[carrier] * around * (shape.ranks - 1) / shape.ranks
    return float(method.seconds_start) + latency + bytes_sent / (shape.bytes_per_second * _fraction(method))


def _tree(carrier: str, shape: Shape, bytes_sent: int, method: Method) -> float | None:
    """Chains inside nodes, two complementary binary trees between them; up and down again."""
    if carrier != "all_reduce":
        return None
    size = payload(carrier, shape.ranks, bytes_sent)
    chain = (shape.ranks_per_node - 1) * max((_step(method, c.level.medium) for c in shape.inside), default=0.0)
    depth = math.log2(shape.nodes) * (_step(method, "network") if shape.outside else 0.0)
    bandwidth = 0.5 * shape.bytes_per_second * _fraction(method) * tree_factor(method.protocol, size)
    return float(method.seconds_start) + 2 * (chain + depth) + size / bandwidth


def _hierarchical(carrier: str, shape: Shape, bytes_sent: int, method: Method) -> float | None:
    """Scatter inside nodes, the collective between equal places of all nodes, gather inside."""
    inside, outside = Shape(shape.ranks_per_node, shape.inside), Shape(shape.nodes, shape.outside)
    if carrier not in ("all_reduce", "all_gather", "reduce_scatter") or inside.ranks < 2 or outside.ranks < 2:
        return None
    size = payload(carrier, shape.ranks, bytes_sent)
    parts = [_ring(carrier, part, _volume(carrier, part.ranks, size), method) for part in (inside, outside)]
    return sum(part for part in parts if part is not None) - float(method.seconds_start)


def _volume(carrier: str, ranks: int, size: float) -> int:
    return int(PASSES[carrier] * (ranks - 1) / ranks * size)


def _nvls(carrier: str, shape: Shape, bytes_sent: int, method: Method) -> float | None:
    """The switch adds: every rank sends its data once and receives the sum."""
    if carrier not in ("all_reduce", "all_gather", "reduce_scatter") or shape.outside or shape.ranks < 3:
        return None
    size = payload(carrier, shape.ranks, bytes_sent) if carrier == "all_reduce" else bytes_sent
    latency = sum(_step(method, medium) for medium in shape.media)
    return float(method.seconds_start) + latency + size / (shape.bytes_per_second * _fraction(method))


def _step(method: Method, medium: str) -> float:
    return float(method.seconds_step[medium])


def _fraction(method: Method) -> float:
    return float(method.fraction_bandwidth)


_ALGORITHMS: Mapping[str, Callable[[str, Shape, int, Method], float | None]] = {
    "ring": _ring,
    "tree": _tree,
    "hierarchical": _hierarchical,
    "nvls": _nvls,
}
