"""One recurrent layer over time, in one or both directions, on the hidden units of one rank.

Both directions run in step, so a time step has one transfer for one direction or two. Tensors are (time, directions,
samples, …), with the second direction's time reversed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from convmesh.dist import all_reduce
from convmesh.ops.recurrent.gate_maths import GateMaths
from convmesh.ops.recurrent.hidden_exchange import HiddenExchange


@dataclass(frozen=True)
class Recurrence:
    """What is the same in every step."""

    maths: GateMaths
    exchange: HiddenExchange
    sums_output_gradient: bool
    """Whether every rank has only a part of the gradient of all outputs, as a next layer with cut units leaves it."""


class RecurrenceFunction(torch.autograd.Function):
    """All steps. Backward sums each step's gradient of the state before it; weight gradients are computed last."""

    @staticmethod
    def forward(
        ctx: Any,
        given: torch.Tensor,
        first: torch.Tensor,
        cell: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        projection: torch.Tensor | None,
        layer: Recurrence,
    ) -> tuple[torch.Tensor | None, ...]:
        """All states, the last one, and the last cell state.

        `given` is the input's part of the gates, `first` the whole first state, `weight` (directions, gates · units,
        state), `bias` (directions, 1, gates · units), `projection` (directions, features, units).
        """
        exchange, states, kept, made = layer.exchange, [first], list[torch.Tensor](), list[torch.Tensor]()
        own = exchange.part(first)
        for each in given:
            recalled = _product(states[-1], weight, bias)
            own, cell, used = layer.maths.step(each, recalled, own, cell)
            kept += used
            if projection is not None:
                made.append(own)
                states.append(exchange.show(_product(own, projection, None)))
            else:
                states.append(exchange.show(own))
        shown = torch.stack(states[1:])
        ctx.layer, ctx.count, ctx.has_bias = layer, len(kept) // max(len(given), 1), bias is not None
        ctx.save_for_backward(first, shown, weight, projection, *made, *kept)
        return shown, states[-1].clone(), cell

    @staticmethod
    def backward(
        ctx: Any, shown_grad: torch.Tensor, last_grad: torch.Tensor, cell_grad: torch.Tensor | None
    ) -> tuple[Any, ...]:
        layer: Recurrence = ctx.layer
        first, shown, weight, projection, *rest = ctx.saved_tensors
        made, kept = (rest[: len(shown)], rest[len(shown) :]) if projection is not None else ([], rest)
        exchange = layer.exchange
        own = exchange.summed_part(shown_grad) if layer.sums_output_gradient else exchange.part(shown_grad)
        grad, partial, direct = exchange.part(last_grad), None, None
        given, recalled, projected = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        for time in reversed(range(len(shown))):
            if partial is not None:
                grad = exchange.summed_part(partial) if direct is None else exchange.summed_part(partial) + direct
            grad = grad + own[time]
            projected.append(grad)
            units = grad if projection is None else torch.bmm(grad, projection)
            back = layer.maths.back(tuple(kept[time * ctx.count : (time + 1) * ctx.count]), units, cell_grad)
            direct, cell_grad = back.hidden, back.cell
            given.append(back.given)
            recalled.append(back.recalled)
            partial = torch.bmm(back.recalled, weight)
        wants = ctx.needs_input_grad
        first_grad = None
        if wants[1]:
            assert partial is not None
            whole = exchange.with_part(partial, direct)
            first_grad = all_reduce(whole, exchange.mesh, exchange.axes)
        gates = torch.stack(recalled[::-1]) if wants[3] or wants[4] else None
        seen = torch.cat([first.unsqueeze(0), shown[:-1]]) if wants[3] else None
        return (
            torch.stack(given[::-1]) if wants[0] else None,
            first_grad,
            cell_grad if wants[2] else None,
            _outer(gates, seen) if gates is not None and seen is not None else None,
            gates.sum((0, 2)).unsqueeze(1) if wants[4] and gates is not None else None,
            _outer(torch.stack(projected[::-1]), torch.stack(made)) if wants[5] else None,
            None,
        )


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """For each direction, samples times the transpose of its weight."""
    if bias is None:
        return torch.bmm(x, weight.transpose(1, 2))
    return torch.baddbmm(bias, x, weight.transpose(1, 2))


def _outer(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A weight's gradient over all time steps at once, from two tensors of (time, directions, samples, …)."""
    rows, columns = (t.transpose(0, 1).flatten(1, 2) for t in (grad, x))
    return torch.bmm(rows.transpose(1, 2), columns)
