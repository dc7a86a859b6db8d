"""A layer with cut channels that processes one sub-batch after another: one travels while another is computed.

This is how convolutions cut by samples meet dense layers cut by filters over the same ranks (Krizhevsky's "one weird
trick"): every rank needs all samples, and can start on the first ones before the last arrive.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from convmesh.dist import Reduction
from convmesh.dist.exchange import Fetching, PendingExchange, accumulate
from convmesh.layout import Layout, Partition, Span
from convmesh.layout.layout import LAYOUTS_KEPT, Cut
from convmesh.ops.channels.channel_function import CutLayer, post_partial
from convmesh.ops.core.device_constants import vector


@dataclass(frozen=True, slots=True)
class SubBatch:
    """The rows of this rank's input and output in one sub-batch, and the layout of its input."""

    layout: Layout
    rows_in: tuple[int, ...]
    rows_out: tuple[int, ...]


@lru_cache(maxsize=LAYOUTS_KEPT)
def sub_batches(source: Layout, output: Layout, rank: int, count: int) -> tuple[SubBatch, ...]:
    """Split every rank's samples into `count` parts as evenly as possible; the ranks' k-th parts form sub-batch k."""
    (axes, samples), shares = source.cuts[0], []
    for part in range(samples.parts):
        span = samples.span(part)
        inner = Partition.even(span.extent, count)
        shares.append([Span(span.start + s.start, span.start + s.stop) for s in map(inner.span, range(count))])
    held, produced = source.box(rank).spans[0], output.box(rank).spans[0]
    batches = []
    for k in range(count):
        spans = [share[k] for share in shares]
        cut = Cut(axes, Partition.of_sizes([span.extent for span in spans]))
        rows = [row for span in spans for row in range(span.start, span.stop)]
        batches.append(
            SubBatch(
                layout=source.replacing({0: cut}),
                rows_in=tuple(row - held.start for row in rows if held.start <= row < held.stop),
                rows_out=tuple(row - produced.start for row in rows if produced.start <= row < produced.stop),
            )
        )
    return tuple(batches)


@dataclass(frozen=True)
class StreamedLayer:
    """One rank's part of a streamed layer: the layer and the rows of every sub-batch."""

    parts: tuple[CutLayer, ...]
    batches: tuple[SubBatch, ...]
    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]


class StreamedFunction(torch.autograd.Function):
    """Posts all sub-batches first; computes each as it arrives and sends its result at once."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: StreamedLayer
    ) -> torch.Tensor:
        arriving = [_fetching(part, part.inputs, x[_rows(b.rows_in, x.device)]) for part, b in _pairs(layer)]
        gathered, leaving = [], []
        for part, fetching in zip(layer.parts, arriving, strict=True):
            gathered.append(fetching.wait())
            partial = part.local.forward(gathered[-1], weight, bias if part.has_bias_duty else None)
            leaving.append((partial, post_partial(part, part.outputs, partial)))
        ctx.layer = layer
        ctx.save_for_backward(weight, *gathered)
        return _collected(layer, [b.rows_out for b in layer.batches], layer.shape_out, leaving, outputs=True)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        layer: StreamedLayer = ctx.layer
        weight, *gathered = ctx.saved_tensors
        wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
        arriving = [_fetching(part, part.outputs, dy[_rows(b.rows_out, dy.device)]) for part, b in _pairs(layer)]
        grads, leaving = [], []
        for part, x, fetching in zip(layer.parts, gathered, arriving, strict=True):
            grads.append(fetching.wait())
            if wants_x:
                partial = part.local.input_gradient(grads[-1], x, weight)
                leaving.append((partial, post_partial(part, part.inputs, partial)))
        weight_grads = [_weight_gradient(layer, grads, gathered, weight)] if wants_w else []
        weight_grads += [torch.stack([layer.parts[0].bias_gradient(g) for g in grads]).sum(0)] if wants_b else []
        sums = Reduction(weight_grads, layer.parts[0].mesh, layer.parts[0].reduce_axes) if weight_grads else None
        rows = [b.rows_in for b in layer.batches]
        dx = _collected(layer, rows, layer.shape_in, leaving, outputs=False) if wants_x else None
        reduced = iter(sums.wait() if sums else ())
        return dx, next(reduced) if wants_w else None, next(reduced) if wants_b else None, None


def _pairs(layer: StreamedLayer) -> Any:
    return zip(layer.parts, layer.batches, strict=True)


def _rows(rows: tuple[int, ...], device: torch.device) -> torch.Tensor | slice:
    """An index for these rows; consecutive rows become a slice, which is a view."""
    if not rows or rows == tuple(range(rows[0], rows[-1] + 1)):
        return slice(rows[0], rows[-1] + 1) if rows else slice(0, 0)
    return vector(rows, torch.int64, device)


def _fetching(part: CutLayer, plan: Any, rows: torch.Tensor) -> Fetching:
    return Fetching(part.mesh, plan, rows.contiguous(memory_format=part.wire), part.wire)


def _weight_gradient(
    layer: StreamedLayer, grads: list[torch.Tensor], gathered: list[torch.Tensor], weight: torch.Tensor
) -> torch.Tensor:
    """Sum over the sub-batches; computed last, while the inputs' gradients travel."""
    parts = [p.local.weight_gradient(g, x, weight) for p, g, x in zip(layer.parts, grads, gathered, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total.add_(part)
    return total


def _collected(
    layer: StreamedLayer,
    rows: list[tuple[int, ...]],
    shape: tuple[int, ...],
    leaving: list[tuple[torch.Tensor, PendingExchange]],
    outputs: bool,
) -> torch.Tensor:
    """The results of all sub-batches, each in its rows."""
    whole = leaving[0][0].new_empty(shape)
    for part, chosen, (partial, transfer) in zip(layer.parts, rows, leaving, strict=True):
        plan = part.outputs if outputs else part.inputs
        whole[_rows(chosen, whole.device)] = accumulate(part.mesh, plan, partial, transfer.wait())
    return whole
