"""Measuring the transfer table of the machine at hand: every carrier of the runtime, by size, group and ranks."""

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
from convmesh.measure.timed_carriers import BESIDE_NODES, MAKERS, ONE_WAY, TURNS
from convmesh.measure.timing import AXES, Spell, one_by_one, posting, slowest, together
from convmesh.system.curves import TransferCurve
from convmesh.system.transfer_table import Overlap, TransferTable
from convmesh.testing import RankPool

Launch = Callable[..., list[Any]]
"""Runs a function on so many ranks of one job and returns what each returned."""

COMMON = ("all_reduce", "all_gather", "reduce_scatter", "neighbour", "stage")
"""Carriers that training is full of: measured at more sizes than the others."""

BYTES_LEAST = 64
BYTES_RARE = 16 << 20
"""More than this seldom travels at once: buckets of gradients are of 25 MiB at most."""

SECONDS_LONGEST = 0.3
"""A size that would take longer is left out: bandwidth rules there, and the curve goes on in line."""

LEAST_SIZES = 3
"""Of every curve, however slow."""

LEAST_SHARE = 0.2
"""Of what a transfer takes: no less than this is on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What is measured and for how long."""

    ranks: tuple[int, ...] = (2, 4, 8)
    """Ranks of the host that are active together; groups are of these sizes too."""
    carriers: tuple[str, ...] = tuple(MAKERS)
    factor: int = 4
    """From one size to the next."""
    bytes_most: int = 64 << 20
    seconds: float = 45.0
    """For all curves together, about; what there is no time for is left to interpolation."""

    def sizes(self, carrier: str) -> tuple[int, ...]:
        """Bytes that a rank sends."""
        factor = self.factor if carrier in COMMON else self.factor**2
        return tuple(_grid(factor, self.bytes_most))

    def groups(self, active: int, carrier: str) -> tuple[int, ...]:
        """Sizes of groups among so many active ranks."""
        return tuple(n for n in self.ranks if active % n == 0 and (carrier != "stage" or n == 2))

    @property
    def seconds_curve(self) -> float:
        """For one carrier in one group shape."""
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
    """The table of this host: ranks of one thread each, joined as training on it would be."""
    chosen = effort or Effort()
    own = forked(2, measure_posting, chosen.carriers)[0] if backend == "gloo" else {}
    curves: list[TransferCurve] = []
    overlaps: list[Overlap] = []
    for ranks in chosen.ranks:
        measured, overlap = (launch or forked)(ranks, measure_ranks, chosen)[0]
        curves += [once_posted(curve, own.get(curve.carrier, 0.0)) for curve in measured]
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
    """On ranks forked from this process and joined by Gloo."""
    with RankPool(ranks, seconds_timeout=300) as pool:
        return pool.run(call, *args)


def measure_posting(carriers: Sequence[str]) -> dict[str, float]:
    """By carrier what the smallest transfer between two ranks takes the thread that posts it.

    Nodes that send have it among what their Python takes, which was measured on two ranks too.
    """
    mesh = open_mesh(Mesh(filter=2))
    return {name: posting(mesh, MAKERS[name](mesh, BYTES_LEAST)) for name in carriers if name not in BESIDE_NODES}


def once_posted(curve: TransferCurve, seconds_own: float) -> TransferCurve:
    """From when it is posted on."""
    return replace(curve, seconds=tuple(max(LEAST_SHARE * s, s - seconds_own) for s in curve.seconds))


def measure_ranks(effort: Effort) -> tuple[list[TransferCurve], Overlap]:
    """What a job of this many ranks measures, on each of them."""
    active = torch.distributed.get_world_size()
    curves = []
    for carrier in effort.carriers:
        for ranks in effort.groups(active, carrier):
            mesh = open_mesh(Mesh(data=active // ranks, filter=ranks))
            curves.append(measure_curve(carrier, mesh, effort.sizes(carrier), effort.seconds_curve))
    return curves, measure_overlap(open_mesh(Mesh(filter=active)))


def measure_curve(carrier: str, mesh: OpenMesh, sizes: Sequence[int], seconds: float) -> TransferCurve:
    """One carrier in groups of one size: a few sizes in any case, those between as long as there is time."""
    found: dict[int, Spell] = {}
    begun = time.perf_counter()
    for number, size in enumerate(_coarse_first(sizes)):
        if number >= LEAST_SIZES and slowest(mesh, time.perf_counter() - begun) > seconds:
            break
        if number < LEAST_SIZES or _expected(found, size) < SECONDS_LONGEST:
            sent, spell = _measured(carrier, mesh, size, seconds / len(sizes))
            found[sent] = spell
    return _curve(carrier, mesh, dict(sorted(found.items())))


def _expected(found: Mapping[int, Spell], size: int) -> float:
    """What a size takes if bandwidth rules."""
    largest = max(found)
    return found[largest].seconds * size / largest


def _coarse_first(sizes: Sequence[int]) -> list[int]:
    """Every fourth from the smallest on, then those between; those that take longest and come up least, last."""
    return sorted([*sizes[::4], *sizes[2::4], *sizes[1::2]], key=lambda size: size > BYTES_RARE)


def _measured(carrier: str, mesh: OpenMesh, size: int, seconds: float) -> tuple[int, Spell]:
    """The bytes that a rank sends, as the runtime counts them, and how long they take."""
    once = MAKERS[carrier](mesh, size)
    with mesh.traffic.watch() as seen:
        once()
    spell = (one_by_one if carrier in ONE_WAY else together)(mesh, once, seconds)
    return int(slowest(mesh, seen.bytes_sent[carrier])) or size, spell


def _curve(carrier: str, mesh: OpenMesh, found: Mapping[int, Spell]) -> TransferCurve:
    return TransferCurve(
        carrier=carrier,
        ranks=mesh.mesh.extent(AXES),
        active=mesh.mesh.size,
        bytes_sent=tuple(found),
        seconds=_rising([spell.seconds / TURNS.get(carrier, 1) for spell in found.values()]),
        spread=statistics.median(spell.spread for spell in found.values()),
    )


def _rising(seconds: Sequence[float]) -> tuple[float, ...]:
    """More bytes take no less time; what seems so is noise, and the middle of those beside is nearer to the truth."""
    blocks: list[list[float]] = []
    for value in seconds:
        blocks.append([value])
        while len(blocks) > 1 and statistics.median(blocks[-2]) > statistics.median(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return tuple(statistics.median(block) for block in blocks for _ in block)
