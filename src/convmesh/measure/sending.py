"""Measures the runtime's Python time for nodes that send, by their kind and by what their transfers cut."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from convmesh.layout import Mesh
from convmesh.measure.overheads import CHANNELS, KINDS, Setting, measured_pairs
from convmesh.oracle.simulate.transfer_cuts import cut_of
from convmesh.plans import Program
from convmesh.system.operator_table import Overheads


def _split(strategy: str, axis: str, shape: tuple[int, ...] = (2, CHANNELS, 16, 16)) -> Setting:
    """A setting on two ranks. Few nodes suffice, since nodes that send take long."""
    return Setting(mesh=Mesh(**{axis: 2}), strategy=strategy, shape=shape, depths=(1, 4))


Splits = Sequence[tuple[Setting, tuple[str, ...]]]

DENSE = (4, CHANNELS)
SPLITS: Splits = (
    (_split("data", "data"), ("batchnorm",)),
    (_split("hybrid", "data", DENSE), ("linear",)),
    (_split("spatial", "height"), ("conv", "maxpool", "batchnorm", "instancenorm")),
    (_split("filter", "filter"), ("conv", "convtranspose", "cat")),
    (_split("filter", "filter", DENSE), ("linear",)),
)
"""The kinds of node that send under each strategy. `channel` behaves like `filter`, along another axis."""


def measure_sending(overheads: Overheads, splits: Splits = SPLITS) -> Overheads:
    """Add the CPU time of nodes that send; needs two ranks. Waiting belongs to the transfer and does not count.

    Kinds not measured here are assumed to add as much as batch norm, which sums a few numbers over ranks.
    """
    sending = {name: times for setting, kinds in splits for name, times in _sending(setting, kinds)}
    kinds = {**overheads.kinds, **sending}
    if not {"batchnorm", "batchnorm samples"} <= {*kinds}:
        return replace(overheads, kinds=kinds)
    extra = statistics.mean(kinds["batchnorm samples"]) - statistics.mean(kinds["batchnorm"])
    return replace(overheads, kinds=kinds, seconds_sending=max(0.0, extra))


def _sending(setting: Setting, kinds: Sequence[str]) -> Iterator[tuple[str, tuple[float, float]]]:
    pairs = measured_pairs(torch.device("cpu"), {kind: KINDS[kind] for kind in kinds}, setting)
    for kind, pair in pairs.items():
        if cut := _cut(pair.program, kind):
            yield f"{kind} {cut}", pair.node


def _cut(program: Program, kind: str) -> str | None:
    """What the transfers of the last node of a kind cut; nodes of the same kind precede it."""
    last = next(node for node in reversed(program.nodes) if node.kind == kind)
    return cut_of((*last.forward, *last.backward))
