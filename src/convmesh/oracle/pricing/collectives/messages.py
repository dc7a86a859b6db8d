"""Messages between two ranks, and from all ranks to all."""

from __future__ import annotations

import math

from convmesh.oracle.pricing.collectives.group_shape import Crossing, Shape
from convmesh.system import Device, Method

AT_ONCE = 8
"""Messages that a library keeps in flight for each rank of an all-to-all."""


def seconds_message(crossing: Crossing, bytes_sent: float, senders: int) -> float:
    """Seconds of one message over a level that `senders` ranks of a block use at once."""
    return float(crossing.level.seconds_latency) + bytes_sent / crossing.bytes_per_second_message(senders)


def seconds_packing(device: Device, bytes_sent: float) -> float:
    """Values of a stage are copied into one buffer to be sent, and used where they arrive."""
    bandwidth = float(device.bytes_per_second_memory) * float(device.fraction_memory)
    return float(device.seconds_launch) + 2 * bytes_sent / bandwidth


def seconds_all_to_all(shape: Shape, bytes_sent: float, methods: tuple[Method, ...]) -> float:
    """Each level carries the bytes for peers across it; all ranks send at once, levels work in parallel."""
    start, step = min(_latency(shape, method) for method in methods if shape.media <= set(method.seconds_step))
    each = bytes_sent / (shape.ranks - 1)
    inside, times = 1, [0.0]
    for crossing in shape.crossings:
        together = inside * crossing.blocks
        times.append(each * (together - inside) / crossing.bytes_per_second_rank)
        inside = together
    return start + math.ceil((shape.ranks - 1) / AT_ONCE) * step + max(times)


def _latency(shape: Shape, method: Method) -> tuple[float, float]:
    """Seconds of the start and of the slowest medium's step; only protocols without flags reach full bandwidth."""
    steps = [float(method.seconds_step[medium]) for medium in shape.media]
    penalty = 0.0 if method.protocol == "simple" else math.inf
    return float(method.seconds_start) + penalty, max(steps, default=0.0)
