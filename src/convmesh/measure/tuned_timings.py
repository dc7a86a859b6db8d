"""Convolutions that compiled steps compute by kernels of our own: their times, as the table of operators has them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

from convmesh.kernels.tuned.conv_shape import ConvShape
from convmesh.kernels.tuned.conv_table import ConvTable, Phase
from convmesh.plans.steps import Shape, Work
from convmesh.system.operator_table import OperatorTable, Timing, tuned_call

SPREAD = 0.05
"""Relative spread of one measurement of a kernel."""

_SETTINGS = re.compile(
    r"(\([\d, ]*\)), (\([\d, ]*\)), (\([\d, ]*\)), (True|False), \([\d, ]*\), (\d+)(?:, (\([\w, ]*\)))?\)$"
)
"""At the end of a call: strides, padding, dilation, whether transposed, groups, and which gradients."""


def tuned_timings(works: Iterable[Work], table: ConvTable, operators: OperatorTable) -> Iterator[Timing]:
    """Timings of the `works` of a compiled step that the table gives to our own kernels, and of what these affect.

    Our kernels write channels-last even where torch's do not, because their input has one channel: convolutions that
    read such a value need not convert it.
    """
    listed = list(works)
    own = [(work, seconds) for work in listed if (seconds := _seconds(work, table)) is not None]
    written = {_plain(work.outputs[0], work.dtype) for work, _ in own if work.op == "convolution"}
    for work, seconds in own:
        yield _timing(work, seconds)
    for work in listed:
        if (timing := _behind(work, written, operators)) is not None:
            yield _timing(work, timing.seconds)


def _timing(work: Work, seconds: float) -> Timing:
    return Timing(tuned_call(work.call), work.dtype, work.inputs, work.flops, work.bytes_moved, seconds, SPREAD)


def _plain(shape: Shape, dtype: str) -> str:
    """A tensor as calls write it."""
    return f"{dtype}({', '.join(map(str, shape))})"


def _behind(work: Work, written: Iterable[str], operators: OperatorTable) -> Timing | None:
    """A convolution's time with what our kernels wrote channels-last; None if it reads nothing of theirs."""
    if not work.op.startswith("convolution") or "last=1" not in work.call:
        return None
    call = work.call
    for operand in written:
        call = call.replace(operand, f"{operand[:-1]}, last=1)")
    return None if call == work.call else operators.find(call)


def _seconds(work: Work, table: ConvTable) -> float | None:
    settled = _SETTINGS.search(work.call) if work.op in ("convolution", "convolution_backward") else None
    if settled is None or settled[4] == "True" or settled[5] != "1":
        return None
    phase = _phase(work, settled[6])
    x, weight = work.inputs[:2] if work.op == "convolution" else work.inputs[1:3]
    settings: list[Any] = [ast.literal_eval(settled[place]) for place in (1, 2, 3)]
    shape = ConvShape.of(x, weight, *settings)
    row = None if phase is None else table.row_for(phase, shape, work.dtype)
    return None if row is None else row.seconds * shape.samples * prod(shape.out) / row.outputs


def _phase(work: Work, gradients: str | None) -> Phase | None:
    """The phase that a call is; a compiler calls the two of backward separately."""
    if work.op == "convolution":
        return "forward"
    return {(True, False): "input", (False, True): "weight"}.get(ast.literal_eval(gradients or "()")[:2])  # type: ignore[return-value]
