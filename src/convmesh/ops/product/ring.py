"""Attention with keys and values that go round the ranks; their tokens are cut over the same axes as the queries'.

Each rank looks at one rank's keys at a time, while the next ones are under way, and merges the results; no rank ever
has them all. Backward goes round once more and sends the gradients of keys and values back to their owners
(Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from convmesh.dist import OpenMesh
from convmesh.dist.exchange import Fetching, PendingExchange, Pieces, add_arrived, start
from convmesh.kernels.attention_blocks import KeyBlock, attend, gradients, merged, wide_type
from convmesh.layout import Box, Span
from convmesh.ops.core.masks import keep_mask
from convmesh.ops.product.ring_turns import RingTurn


class Dropped(NamedTuple):
    """Dropout of scores, by their global index."""

    p: float
    seed: int | torch.Tensor
    lead: tuple[Span, ...]
    """This rank's samples and heads."""
    shape: tuple[int, ...]
    """The shape of all scores."""


@dataclass(frozen=True)
class Ring:
    """One rank's part of an attention, the same in every step except for the seed of dropout."""

    mesh: OpenMesh
    turns: tuple[RingTurn, ...]
    rows: Span
    """The numbers of this rank's queries."""
    is_causal: bool
    scale: float
    key_features: int
    device: str
    learns_bias: bool
    dropped: Dropped | None = None

    def block(self, q: torch.Tensor, mask: torch.Tensor | None, columns: Span) -> KeyBlock:
        """How the queries look at some keys."""
        bias = None if mask is None else _added(_columns(mask, columns), q.dtype)
        is_diagonal = self.is_causal and columns == self.rows
        if self.is_causal and not is_diagonal and columns.stop > self.rows.start + 1:
            bias = self._causal(q, columns)
        return KeyBlock(self.scale, bias, is_diagonal, self._kept(q, columns), self._keeps, self.learns_bias)

    def _causal(self, q: torch.Tensor, columns: Span) -> torch.Tensor:
        hidden = torch.ones(self.rows.extent, columns.extent, dtype=torch.bool, device=q.device)
        return q.new_zeros(hidden.shape).masked_fill(hidden.triu(self.rows.start - columns.start + 1), -math.inf)

    def _kept(self, q: torch.Tensor, columns: Span) -> torch.Tensor | None:
        if self.dropped is None:
            return None
        box = Box((*self.dropped.lead, self.rows, columns))
        return keep_mask(box, self.dropped.shape, self.dropped.seed, self.dropped.p, q.device)

    @property
    def _keeps(self) -> float:
        return 1.0 if self.dropped is None else 1.0 - self.dropped.p

    def parts(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, which travel as one tensor."""
        return both[..., : self.key_features], both[..., self.key_features :]

    def round(self, both: torch.Tensor) -> Iterator[tuple[RingTurn, torch.Tensor]]:
        """Every turn with its keys and values; meanwhile the next turn's are under way."""
        coming = self._fetch(1, both)
        for number, turn in enumerate(self.turns):
            here = both if coming is None or number == 0 else coming.wait()
            coming = coming if number == 0 else self._fetch(number + 1, both)
            yield turn, here

    def _fetch(self, number: int, both: torch.Tensor) -> Fetching | None:
        if number >= len(self.turns):
            return None
        exchange = self.turns[number].exchange
        assert exchange is not None
        return Fetching(self.mesh, exchange, both, torch.contiguous_format)


class RingFunction(torch.autograd.Function):
    """Maps queries, keys with values, and a mask for all keys to what the queries see."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, both: torch.Tensor, mask: torch.Tensor | None, ring: Ring) -> torch.Tensor:
        made, sums = _nothing(q, both.shape[-1] - ring.key_features)
        for turn, here in ring.round(both):
            if turn.columns.extent:
                block = ring.block(q, mask, turn.columns)
                made, sums = merged(made, sums, *attend(q, *ring.parts(here), block, ring.device))
        made = made.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, both, mask, made, sums)
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        ring: Ring = ctx.ring
        q, both, mask, made, sums = ctx.saved_tensors
        dq, dboth = torch.zeros_like(q), torch.zeros_like(both)
        dmask = torch.zeros_like(mask) if mask is not None and ring.learns_bias else None
        returning: list[tuple[RingTurn, PendingExchange]] = []
        for turn, here in ring.round(both):
            gradient = here.new_empty(here.shape)
            if turn.columns.extent:
                block, (k, v) = ring.block(q, mask, turn.columns), ring.parts(here)
                part = gradients(grad, q, k, v, made, sums, block, ring.device)
                dq += part.query
                gradient = torch.cat([part.key, part.value], -1)
                if dmask is not None and part.bias is not None:
                    _columns(dmask, turn.columns).add_(part.bias)
            if turn.exchange is None:
                dboth += gradient if turn.columns.extent else 0
            else:
                returning.append((turn, _sent_back(ring.mesh, turn, gradient)))
        for turn, sent in returning:
            assert turn.exchange is not None
            add_arrived(ring.mesh, turn.exchange, dboth, sent.wait())
        return dq, dboth, dmask, None


def _sent_back(mesh: OpenMesh, turn: RingTurn, found: torch.Tensor) -> PendingExchange:
    """Post the gradients found for other ranks' keys and values to them."""
    plan = turn.exchange
    assert plan is not None
    payload = Pieces([(plan.frame, found)], found)
    return start(mesh, plan.adjoint, plan.adjoint_carrier, plan.group_axes, payload)


def _nothing(q: torch.Tensor, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What queries see before they have looked at anything."""
    wide = wide_type(q.dtype)
    made = torch.zeros(*q.shape[:-1], features, dtype=wide, device=q.device)
    return made, torch.full(q.shape[:-1], -math.inf, dtype=wide, device=q.device)


def _columns(mask: torch.Tensor, columns: Span) -> torch.Tensor:
    """The part of a mask for some keys; all of it if it is the same for every key."""
    return mask if mask.shape[-1] == 1 else mask[..., columns.slice()]


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as what it adds to scores; a boolean one hides the keys where it is False."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)
