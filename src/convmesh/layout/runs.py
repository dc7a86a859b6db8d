"""Runs of a tensor's values in row-major order, as boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from convmesh.layout.box import Box, Span


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The values from `start` to `stop` in row-major order, as disjoint boxes in that order: at most 2·dims − 1."""
    if start >= stop:
        return []
    if not shape:
        return [Box(())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        return _in_row(shape, last, start, stop)
    middle = [Box((Span(first, last), *Box.whole(shape[1:]).spans))] if first < last else []
    return [*_in_row(shape, first - 1, start, first * row), *middle, *_in_row(shape, last, last * row, stop)]


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    begin = row * math.prod(shape[1:])
    boxes = boxes_of_run(shape[1:], start - begin, stop - begin)
    return [Box((Span(row, row + 1), *box.spans)) for box in boxes]
