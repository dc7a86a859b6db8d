"""Measures this machine's transfer table: every carrier of the runtime, by size, group and ranks."""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from convmesh.dist import OpenMesh, open_mesh
from convmesh.layout import Mesh
from convmesh.measure.overlap import measure_overlap
from convmesh.measure.spawned import spawned
from convmesh.measure.timed_carriers import MAKERS, ONE_WAY, OUTSIDE_NODES, TURNS
from convmesh.measure.timing import AXES, MeasuredTime, one_by_one, posting, slowest, time_after_work
from convmesh.system.curves import TransferCurve
from convmesh.system.transfer_table import Overlap, TransferTable
from convmesh.testing import RankPool

Launch = Callable[..., list[Any]]
"""Runs a function on the given number of ranks of one job and returns their results."""

COMMON = ("all_reduce", "all_gather", "reduce_scatter", "neighbour", "stage")
"""The most frequent carriers in training: measured at more sizes than the others."""

BYTES_LEAST = 64
BYTES_RARE = 16 << 20
"""Larger transfers are rare: buckets of gradients have at most 25 MiB."""

SECONDS_LONGEST = 0.3
"""Sizes that would take longer are skipped: there bandwidth dominates, and the curve is extrapolated linearly."""

LEAST_SIZES = 3
"""Sizes measured on every curve, however slow."""

LEAST_SHARE = 0.2
"""Least fraction of a transfer's time that is not posting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What to measure and for how long."""

    ranks: tuple[int, ...] = (2, 4, 8)
    """Numbers of ranks of the host that are active at once; groups have these sizes too."""
    carriers: tuple[str, ...] = tuple(MAKERS)
    factor: int = 4
    """Ratio of one size to the previous one."""
    bytes_most: int = 64 << 20
    seconds: float = 45.0
    """Approximate time for all curves together; what there is no time for is left to interpolation."""

    def sizes(self, carrier: str) -> tuple[int, ...]:
        """Bytes that a rank sends."""
        factor = self.factor if carrier in COMMON else self.factor**2
        return tuple(_grid(factor, self.bytes_most))

    def groups(self, active: int, carrier: str) -> tuple[int, ...]:
        """Sizes of groups among `active` ranks."""
        return tuple(n for n in self.ranks if active % n == 0 and (carrier != "stage" or n == 2))

    @property
    def seconds_curve(self) -> float:
        """Time for one carrier with one group size."""
        return self.seconds / sum(len(self.groups(a, carrier)) for a in self.ranks for carrier in self.carriers)


def _grid(factor: int, most: int) -> Iterator[int]:
    size = BYTES_LEAST
    while size < most:
        yield size
        size *= factor
    yield most


def measure_transfers(
    effort: Effort | None = None, backend: str = "gloo", launch: Launch | None = None
) -> TransferTable:
    """The table of this host, for ranks of one thread each, joined as in training."""
    chosen = effort or Effort()
    posting_times = forked(2, measure_posting, chosen.carriers)[0] if backend == "gloo" else {}
    curves: list[TransferCurve] = []
    overlaps: list[Overlap] = []
    for ranks in chosen.ranks:
        measured, overlap = (launch or forked)(ranks, measure_ranks, chosen)[0]
        curves += [without_posting(curve, posting_times.get(curve.carrier, 0.0)) for curve in measured]
        overlaps.append(overlap)
    return TransferTable(
        backend=backend,
        cores=len(os.sched_getaffinity(0)) if backend == "gloo" else max(chosen.ranks),
        curves=tuple(curves),
        overlaps=tuple(overlaps),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def measure_between_gpus(gpus: int, seconds: float = 45.0) -> TransferTable:
    """The table of this host's GPUs, one rank on each, joined by NCCL."""
    ranks = tuple(n for n in (2, 4, 8, 16) if n <= gpus)
    return measure_transfers(Effort(ranks=ranks, seconds=seconds), backend="nccl", launch=spawned)


def forked(ranks: int, call: Callable[..., Any], *args: Any) -> list[Any]:
    """Run on ranks forked from this process and joined by Gloo."""
    with RankPool(ranks, seconds_timeout=300) as pool:
        return pool.run(call, *args)


def measure_posting(carriers: Sequence[str]) -> dict[str, float]:
    """By carrier, the CPU time of posting the smallest transfer between two ranks.

    For nodes that send, their Python overhead, also measured on two ranks, includes it.
    """
    mesh = open_mesh(Mesh(filter=2))
    return {name: posting(mesh, MAKERS[name](mesh, BYTES_LEAST)) for name in carriers if name not in OUTSIDE_NODES}


def without_posting(curve: TransferCurve, seconds_posting: float) -> TransferCurve:
    """The curve less the time to post."""
    return replace(curve, seconds=tuple(max(LEAST_SHARE * s, s - seconds_posting) for s in curve.seconds))


def measure_ranks(effort: Effort) -> tuple[list[TransferCurve], Overlap]:
    """Curves and overlap of the job that this rank belongs to; call it on every rank."""
    active = torch.distributed.get_world_size()
    curves = []
    for carrier in effort.carriers:
        for ranks in effort.groups(active, carrier):
            mesh = open_mesh(Mesh(data=active // ranks, filter=ranks))
            curves.append(measure_curve(carrier, mesh, effort.sizes(carrier), effort.seconds_curve))
    return curves, measure_overlap(open_mesh(Mesh(filter=active)))


def measure_curve(carrier: str, mesh: OpenMesh, sizes: Sequence[int], seconds: float) -> TransferCurve:
    """One carrier in groups of one size: always a few sizes, then those between while time remains."""
    by_size: dict[int, MeasuredTime] = {}
    start = time.perf_counter()
    for number, size in enumerate(_coarse_first(sizes)):
        if number >= LEAST_SIZES and slowest(mesh, time.perf_counter() - start) > seconds:
            break
        if number < LEAST_SIZES or _expected(by_size, size) < SECONDS_LONGEST:
            sent, time_taken = _measured(carrier, mesh, size, seconds / len(sizes))
            by_size[sent] = time_taken
    return _curve(carrier, mesh, dict(sorted(by_size.items())))


def _expected(by_size: Mapping[int, MeasuredTime], size: int) -> float:
    """Expected time of a size if bandwidth dominates."""
    largest = max(by_size)
    return by_size[largest].seconds * size / largest


def _coarse_first(sizes: Sequence[int]) -> list[int]:
    """Every fourth size from the smallest, then those between; the largest, which are slow and rare, come last."""
    return sorted([*sizes[::4], *sizes[2::4], *sizes[1::2]], key=lambda size: size > BYTES_RARE)


def _measured(carrier: str, mesh: OpenMesh, size: int, seconds: float) -> tuple[int, MeasuredTime]:
    """The bytes that a rank sends, as the runtime counts them, and their time."""
    once = MAKERS[carrier](mesh, size)
    with mesh.traffic.watch() as traffic:
        once()
    time_taken = (one_by_one if carrier in ONE_WAY else time_after_work)(mesh, once, seconds)
    return int(slowest(mesh, traffic.bytes_sent[carrier])) or size, time_taken


def _curve(carrier: str, mesh: OpenMesh, by_size: Mapping[int, MeasuredTime]) -> TransferCurve:
    return TransferCurve(
        carrier=carrier,
        ranks=mesh.mesh.extent(AXES),
        active=mesh.mesh.size,
        bytes_sent=tuple(by_size),
        seconds=_rising([time_taken.seconds / TURNS.get(carrier, 1) for time_taken in by_size.values()]),
        spread=statistics.median(time_taken.spread for time_taken in by_size.values()),
    )


def _rising(seconds: Sequence[float]) -> tuple[float, ...]:
    """Make times rise with size: a fall is noise, so each falling run is replaced by its median."""
    blocks: list[list[float]] = []
    for value in seconds:
        blocks.append([value])
        while len(blocks) > 1 and statistics.median(blocks[-2]) > statistics.median(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return tuple(statistics.median(block) for block in blocks for _ in block)
