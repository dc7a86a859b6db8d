"""What the runtime's Python takes for nodes that send, by their kind and by what their transfers cut."""

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
    """On two ranks. Nodes that send take long enough for few of them to tell."""
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
"""The kinds of node that send under each strategy. What `channel` does is what `filter` does, along another axis."""


def measure_sending(overheads: Overheads, splits: Splits = SPLITS) -> Overheads:
    """With what nodes that send take of a processor; needs two ranks. Waiting is not counted: it is the transfer's.

    Kinds that were not measured so are taken to add what batch norm does, which sums a few numbers over ranks.
    """
    found = {name: times for setting, kinds in splits for name, times in _sending(setting, kinds)}
    kinds = {**overheads.kinds, **found}
    if not {"batchnorm", "batchnorm samples"} <= {*kinds}:
        return replace(overheads, kinds=kinds)
    more = statistics.mean(kinds["batchnorm samples"]) - statistics.mean(kinds["batchnorm"])
    return replace(overheads, kinds=kinds, seconds_sending=max(0.0, more))


def _sending(setting: Setting, kinds: Sequence[str]) -> Iterator[tuple[str, tuple[float, float]]]:
    pairs = measured_pairs(torch.device("cpu"), {kind: KINDS[kind] for kind in kinds}, setting)
    for kind, pair in pairs.items():
        if cut := _cut(pair.program, kind):
            yield f"{kind} {cut}", pair.node


def _cut(program: Program, kind: str) -> str | None:
    """Of the last node of a kind, which others of its kind came before."""
    last = next(node for node in reversed(program.nodes) if node.kind == kind)
    return cut_of((*last.forward, *last.backward))
