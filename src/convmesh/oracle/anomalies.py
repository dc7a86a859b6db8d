"""A measured step against its prediction: which device, layer or link is off, and by how much.

Ranks are compared with each other, so an inaccurate prediction does no harm: it only relates parts of different size.
Layers are compared with the prediction, within its interval. All comparisons use medians, which an outlier barely
moves.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from convmesh.layout.mesh import Mesh
from convmesh.oracle.pricing.estimate import Estimate
from convmesh.oracle.profile import Cell, Profile, TimedTransfer, transfers_of
from convmesh.oracle.simulate.stand_ins import Crowd
from convmesh.oracle.simulate.step_times import Scheduled
from convmesh.oracle.simulate.timeline import Timeline
from convmesh.plans.program_table import amount

K = TypeVar("K", bound=Hashable)

LEAST = 1.1
"""A deviation below 10 % is no anomaly."""

DEVIATIONS = 4.0
"""Robust standard deviations from the median beyond which a value is off."""

NEGLIGIBLE = 1e-4
"""Share of the step below which a part is ignored. So is a part with no measured time, such as a transfer that reached
a GPU before its stream needed it."""


class Expected(Protocol):
    """What a step is compared with: a `Prediction`, or one that a run saved."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def parts(self) -> Scheduled: ...


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A part that takes `ratio` times its expected time and adds about `seconds` to the step."""

    what: Literal["step", "rank", "layer", "link"]
    ratio: float
    seconds: float
    sentence: str
    rank: int | None = None
    layer: str = ""
    phase: str = ""
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.sentence


def find_anomalies(profile: Profile, prediction: Expected) -> list[Anomaly]:
    """The parts that are off, the costliest first."""
    crowd = Crowd(prediction.mesh, prediction.parts.timeline.ranks)
    least = prediction.parts.step.value * NEGLIGIBLE
    ratios = _layer_ratios(profile, prediction.parts.timeline, crowd, least)
    common = _median(ratio for of_rank in ratios.values() for ratio, _ in of_rank.values())
    anomalies = [
        *_everything(common, profile, prediction),
        *_devices_and_layers(ratios, common, prediction.parts.compute),
        *_links(profile, prediction, crowd, least),
    ]
    return sorted(anomalies, key=lambda anomaly: -anomaly.seconds)


Ratios = Mapping[int, Mapping[Cell, tuple[float, float]]]
"""By rank, layer and phase: measured over expected seconds, and the expected seconds."""


def _layer_ratios(profile: Profile, timeline: Timeline, crowd: Crowd, least: float) -> Ratios:
    expected = {rank: timeline.seconds_by_layer(rank) for rank in crowd.ranks}
    return {
        rank: {
            cell: (seconds / expected[crowd.stand_in(rank)][cell], expected[crowd.stand_in(rank)][cell])
            for cell, seconds in layers.items()
            if seconds and expected[crowd.stand_in(rank)].get(cell, 0.0) > least
        }
        for rank, layers in profile.layers.items()
    }


def _everything(common: float, profile: Profile, prediction: Expected) -> Iterator[Anomaly]:
    """All layers of all ranks are off alike: the prediction is wrong, or the machine as a whole."""
    compute = prediction.parts.compute
    if not _within(common, compute):
        text = f"every layer of every rank takes {common:.2g}x the prediction: check the system file, or all devices."
        yield Anomaly("step", common, (common - 1) * compute.value, text)
    step = profile.seconds_step
    if step and _within(common, compute) and not _within(step / prediction.parts.step.value, prediction.parts.step):
        ratio = step / prediction.parts.step.value
        text = f"the step takes {ratio:.2g}x the prediction, though its layers do not: look between the layers."
        yield Anomaly("step", ratio, step - prediction.parts.step.value, text)


def _devices_and_layers(ratios: Ratios, common: float, compute: Estimate) -> Iterator[Anomaly]:
    factors = {rank: _median(r for r, _ in cells.values()) / common for rank, cells in ratios.items()}
    slow = {rank: factor for rank, factor in factors.items() if factor > _limit(factors.values())}
    for rank, factor in slow.items():
        lost = (factor - 1) * common * sum(seconds for _, seconds in ratios[rank].values())
        text = f"rank {rank}: every layer {factor:.2g}x slower than on other ranks: its device."
        yield Anomaly("rank", factor, lost, text, rank=rank)
    yield from _layers(ratios, {rank: factors[rank] if rank in slow else 1.0 for rank in ratios}, common, compute)


def _layers(ratios: Ratios, factors: Mapping[int, float], common: float, compute: Estimate) -> Iterator[Anomaly]:
    """Layers that are off once slow devices are accounted for."""
    rest: dict[Cell, dict[int, float]] = defaultdict(dict)
    expected: dict[Cell, float] = {}
    for rank, cells in ratios.items():
        for cell, (ratio, seconds) in cells.items():
            rest[cell][rank] = ratio / common / factors[rank]
            expected[cell] = max(seconds, expected.get(cell, 0.0))
    middle = {cell: _median(of_ranks.values()) for cell, of_ranks in rest.items()}
    limit = max(_limit(middle.values()), compute.high / compute.value if compute.value else 1.0)
    for (layer, phase), ratio in middle.items():
        cell = (layer, phase)
        if ratio > limit:
            text = f"{part_named(layer, phase)} {ratio:.2g}x: {'the layer, ' if layer else ''}on every rank."
            yield Anomaly("layer", ratio, (ratio - 1) * common * expected[cell], text, layer=layer, phase=phase)
        for rank, own in _off(rest[cell]):
            where = "this layer on this rank only" if layer else "on this rank only"
            text = f"rank {rank}, {part_named(layer, phase)} {own:.2g}x: {where}."
            lost = (own - 1) * common * expected[cell]
            yield Anomaly("layer", own, lost, text, rank=rank, layer=layer, phase=phase)


def _links(profile: Profile, prediction: Expected, crowd: Crowd, least: float) -> Iterator[Anomaly]:
    """Transfers over the same axes: all of them slow, or those of some groups of ranks."""
    expected = {(r, t.cell): t.seconds for r in crowd.ranks for t in transfers_of(prediction.parts.timeline, r)}
    by_axes: dict[tuple[str, tuple[str, ...]], dict[int, list[tuple[float, float, TimedTransfer]]]]
    by_axes = defaultdict(lambda: defaultdict(list))
    for transfer in profile.transfers:
        seconds = expected.get((crowd.stand_in(transfer.rank), transfer.cell), 0.0)
        if transfer.seconds and seconds > least:
            kind = (transfer.carrier, transfer.axes)
            by_axes[kind][transfer.rank].append((transfer.seconds / seconds, seconds, transfer))
    for of_ranks in by_axes.values():
        yield from _links_over(of_ranks, profile, prediction)


def _links_over(
    of_ranks: Mapping[int, list[tuple[float, float, TimedTransfer]]], profile: Profile, prediction: Expected
) -> Iterator[Anomaly]:
    factors = {rank: _median(ratio for ratio, _, _ in listed) for rank, listed in of_ranks.items()}
    common = _median(factors.values())
    if not _within(common, _priced(prediction)):
        yield _link(max(factors, key=lambda rank: factors[rank]), common, of_ranks, "all its links")
    slow = dict(_off({rank: factor / common for rank, factor in factors.items()}))
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in slow:
        groups[_group(prediction.mesh, of_ranks[rank][0][2].axes, rank)].append(rank)
    for members, ranks in groups.items():
        worst = max(ranks, key=lambda rank: slow[rank])
        where = _where(members if len(ranks) > 1 else (worst,), profile.ranks_per_node)
        yield _link(worst, slow[worst], of_ranks, where)


def _link(
    rank: int, ratio: float, of_ranks: Mapping[int, list[tuple[float, float, TimedTransfer]]], where: str
) -> Anomaly:
    listed = of_ranks[rank]
    largest = max((transfer for _, _, transfer in listed), key=lambda t: t.bytes_sent)
    lost = (ratio - 1) * sum(seconds for _, seconds, _ in listed)
    axes = "*".join(largest.axes)
    text = f"axis {axes}, {amount(largest.bytes_sent)} {largest.carrier} {ratio:.2g}x: {where}."
    return Anomaly("link", ratio, lost, text, rank=rank, axes=largest.axes)


def _where(ranks: tuple[int, ...], ranks_per_node: int | None) -> str:
    if len(ranks) == 1:
        return f"the links of rank {ranks[0]}"
    nodes = sorted({rank // ranks_per_node for rank in ranks}) if ranks_per_node else []
    if len(nodes) == 1:
        return f"links inside node {nodes[0]}"
    kind, listed = ("nodes", nodes) if nodes else ("ranks", sorted(ranks))
    shown = (
        f"{', '.join(map(str, listed[:-1]))} and {listed[-1]}" if len(listed) < 9 else f"{listed[0]} to {listed[-1]}"
    )
    return f"links between {kind} {shown}"


def _group(mesh: Mesh, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
    return tuple(mesh.group(axes, rank))


def _priced(prediction: Expected) -> Estimate:
    parts = prediction.parts
    return Estimate.total((parts.exposed, parts.hidden))


def _off(values: Mapping[K, float]) -> Iterator[tuple[K, float]]:
    """The values far above the others."""
    limit = _limit(values.values())
    return ((key, value) for key, value in values.items() if len(values) > 2 and value > limit)


def _limit(values: Iterable[float]) -> float:
    """The value above which one is off: far from the median, measured by the others' distances from it."""
    listed = list(values)
    middle = _median(listed)
    deviation = 1.4826 * _median(abs(value - middle) for value in listed)
    return max(LEAST * middle, middle + DEVIATIONS * deviation)


def _median(values: Iterable[float]) -> float:
    listed = list(values)
    return statistics.median(listed) if listed else 1.0


def _within(ratio: float, estimate: Estimate) -> bool:
    """Whether measured over predicted lies in the prediction's interval, or is within `LEAST` of 1."""
    if not estimate.value:
        return True
    return min(estimate.low / estimate.value, 1 / LEAST) <= ratio <= max(estimate.high / estimate.value, LEAST)


def part_named(layer: str, phase: str) -> str:
    """A part of a step in words; the optimiser's update belongs to no layer."""
    return f"{layer} {phase}" if layer else phase
