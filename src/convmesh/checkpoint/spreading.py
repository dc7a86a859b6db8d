"""Which values each rank writes: every value once, the bytes divided evenly among the ranks that hold them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from convmesh.layout import Box
from convmesh.layout.runs import boxes_of_run
from convmesh.runtime.weight_places import WeightPlace

Holders = tuple[int, ...]


@dataclass(frozen=True)
class HeldTensor:
    """The part of a checkpoint's tensor that this rank holds."""

    place: WeightPlace
    values: torch.Tensor
    is_steady: bool = False
    """Whether only an optimiser's update changes it."""

    @property
    def name(self) -> str:
        return self.place.name


@dataclass(frozen=True)
class Written:
    """A box of a tensor that this rank writes, and its values in the rank's own memory."""

    name: str
    box: Box
    values: torch.Tensor
    is_steady: bool = False

    @property
    def key(self) -> str:
        """The tensor's name and the box's offset."""
        return f"{self.name}@{','.join(str(span.start) for span in self.box.spans)}"


def share_of(rank: int, held: Iterable[HeldTensor]) -> list[Written]:
    """What `rank` writes. Tensors with the same holders are treated as one run of bytes and cut into equal parts."""
    rows: dict[Holders, list[Written]] = {}
    for each in held:
        if rank in each.place.holders:
            parts = (Written(each.name, box, v, each.is_steady) for box, v in each.place.parts(each.values))
            rows.setdefault(each.place.holders, []).extend(parts)
    return [piece for holders, row in rows.items() for piece in _part_of(row, holders.index(rank), len(holders))]


def _part_of(row: list[Written], part: int, parts: int) -> list[Written]:
    total = sum(each.values.nbytes for each in row)
    begin, end = total * part // parts, total * (part + 1) // parts
    mine: list[Written] = []
    for each in row:
        mine += _cut(each, begin, end)
        begin, end = begin - each.values.nbytes, end - each.values.nbytes
    return mine


def _cut(whole: Written, begin: int, end: int) -> list[Written]:
    """The values that begin between two byte offsets of a tensor."""
    size, width = whole.values.numel(), whole.values.element_size()
    start, stop = (min(size, max(0, -(-byte // width))) for byte in (begin, end))
    if (start, stop) == (0, size):
        return [whole] if size else []
    boxes = boxes_of_run(whole.values.shape, start, stop)
    return [replace(whole, box=box.inside(whole.box), values=whole.values[box.slices()]) for box in boxes]
