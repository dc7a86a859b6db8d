"""Tensors drawn as blocks of letters, one letter a rank; lower case marks rows that a neighbour's windows reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convmesh.layout import Box, Span

LETTERS = "ABCDEFGHIJKLMNOP"
"""Names of the ranks in a picture; more would not fit on a page."""

_WIDE = 8
"""Characters across one rank's block."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to draw: its name, the names of its dims, its shape, and each rank's box."""

    name: str
    dims: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    halo: tuple[bool, ...] = ()
    """By dim, whether windows reach across the cut."""


def side_by_side(tensors: Sequence[Tensor]) -> list[str]:
    """Pictures of several tensors in one row."""
    drawn = [picture(tensor) for tensor in tensors]
    height = max(map(len, drawn))
    widths = [max(map(len, lines)) for lines in drawn]
    padded = [
        [line.ljust(w) for line in lines + [""] * (height - len(lines))] for lines, w in zip(drawn, widths, strict=True)
    ]
    return ["    ".join(line).rstrip() for line in zip(*padded, strict=True)]


def picture(tensor: Tensor) -> list[str]:
    """A grid: the first cut dim down, the second across; with three cut dims, one grid for each part of the first."""
    cut = [dim for dim in range(len(tensor.shape)) if len(_spans(tensor, dim)) > 1]
    slices, down, across = _roles(cut)
    lines = [f"{tensor.name} {'×'.join(map(str, tensor.shape))}{_cut_text(tensor, cut)}"]
    for part in _spans(tensor, slices) if slices is not None else [None]:
        if part is not None and slices is not None:
            lines.append(_label(tensor, slices, part))
        fixed = {} if slices is None or part is None else {slices: part}
        lines += _grid(tensor, fixed, down, across)
    return lines


def _roles(cut: list[int]) -> tuple[int | None, int | None, int | None]:
    """The dims for separate grids, for rows and for columns."""
    if len(cut) > 2:
        return cut[0], cut[1], cut[2]
    return None, cut[0] if cut else None, cut[1] if len(cut) > 1 else None


def _spans(tensor: Tensor, dim: int | None) -> list[Span]:
    """The distinct parts of a dim, in order."""
    return [] if dim is None else sorted({box.spans[dim] for box in tensor.boxes})


def _cut_text(tensor: Tensor, cut: list[int]) -> str:
    return f", {'·'.join(tensor.dims[dim] for dim in cut)} cut" if cut else ", whole"


def _label(tensor: Tensor, dim: int, span: Span) -> str:
    return f"{tensor.dims[dim]} {span.start}:{span.stop}"


def _grid(tensor: Tensor, fixed: dict[int, Span], down: int | None, across: int | None) -> list[str]:
    rows, columns = _spans(tensor, down), _spans(tensor, across)
    labels = ["" if down is None else _label(tensor, down, row) for row in rows] or [""]
    margin = max(map(len, labels)) + 1
    rule = " " * margin + "+" + "+".join(["-" * _WIDE] * max(1, len(columns))) + "+"
    lines = [_heads(tensor, across, margin)] if across is not None else []
    for index, label in enumerate(labels):
        chosen = fixed | ({} if down is None else {down: rows[index]})
        ends = _ends(_reaches(tensor, down), index, len(rows))
        cells = _row(tensor, chosen, across, ends)
        lines += [
            rule,
            *(f"{label * (n == 0):{margin}}|{'|'.join(cut)}|" for n, cut in enumerate(zip(*cells, strict=True))),
        ]
    return [*lines, rule]


def _heads(tensor: Tensor, across: int, margin: int) -> str:
    heads = [_label(tensor, across, span).ljust(_WIDE + 1) for span in _spans(tensor, across)]
    return " " * (margin + 1) + "".join(heads).rstrip()


def _row(tensor: Tensor, chosen: dict[int, Span], across: int | None, ends: tuple[bool, bool]) -> list[list[str]]:
    """The blocks of one row, all of the same height: three lines where a halo shows above or below."""
    if across is None:
        return [_block(_holders(tensor, chosen), ends, (False, False))]
    columns = _spans(tensor, across)
    return [
        _block(_holders(tensor, {**chosen, across: span}), ends, _ends(_reaches(tensor, across), place, len(columns)))
        for place, span in enumerate(columns)
    ]


def _reaches(tensor: Tensor, dim: int | None) -> bool:
    return dim is not None and bool(tensor.halo) and tensor.halo[dim]


def _ends(reaches: bool, index: int, count: int) -> tuple[bool, bool]:
    """Whether the neighbours before and after read this part's ends."""
    return reaches and index > 0, reaches and index < count - 1


def _holders(tensor: Tensor, chosen: dict[int, Span]) -> str:
    """The letters of the ranks that hold a part."""
    return "".join(
        letter
        for letter, box in zip(LETTERS, tensor.boxes, strict=False)
        if all(box.spans[dim] == span for dim, span in chosen.items())
    )


def _block(letters: str, upper_lower: tuple[bool, bool], left_right: tuple[bool, bool]) -> list[str]:
    """Lines filled with the holder's letter, or one line with all holders."""
    if len(letters) != 1:
        return [(letters if len(letters) <= _WIDE else "all").center(_WIDE)]
    left, right = (letters.lower() if end else letters for end in left_right)
    inside, edge = left + letters * (_WIDE - 2) + right, letters.lower() * _WIDE
    return (
        [edge if upper_lower[0] else inside, inside, edge if upper_lower[1] else inside]
        if any(upper_lower)
        else [inside]
    )
