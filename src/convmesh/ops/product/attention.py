"""Split `scaled_dot_product_attention`.

Samples, heads and queries stay cut as they come; keys and values of this rank's samples and heads are gathered, so the
local kernels (flash, memory-efficient) stay in use. With dropout the product is written out, since those kernels draw
masks of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from convmesh.ops.core.probe import probe
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded, on_mesh
from convmesh.ops.product.contraction import Contraction, Labels, arrangement, contract
from convmesh.ops.product.products import matrix_product

Operand = Sharded | torch.Tensor


@implements(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Operand,
    key: Operand,
    value: Operand,
    attn_mask: Operand | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(query keyᵀ · scale + mask) value."""
    mask = None if attn_mask is None else probe(attn_mask)
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    F.scaled_dot_product_attention(probe(query), probe(key), probe(value), mask, 0.0, **options)
    mesh = next(x.mesh for x in (query, key, value, attn_mask) if isinstance(x, Sharded))
    q, k, v = (on_mesh(x, mesh) for x in (query, key, value))
    masks = [] if attn_mask is None else [on_mesh(attn_mask, mesh)]
    if enable_gqa and q.shape[-3] != k.shape[-3]:
        k, v = (_repeated_heads(x, q.shape[-3]) for x in (k, v))
    if dropout_p > 0:
        return _written_out(q, k, v, masks, dropout_p, is_causal, scale)
    return _attention(q, k, v, masks, is_causal, scale)


def _attention(
    q: Sharded, k: Sharded, v: Sharded, masks: Sequence[Sharded], is_causal: bool, scale: float | None
) -> Sharded:
    terms = _terms(q.dim(), k.dim(), v.dim(), [mask.dim() for mask in masks])
    plan = arrangement(terms, tuple(x.layout for x in (q, k, v, *masks)))
    rows = plan.operands[0].box(q.mesh.rank).spans[-2]
    first = rows.start if is_causal and rows.extent < q.shape[-2] else None
    return contract(terms, [q, k, v, *masks], partial(_local, is_causal=is_causal, first=first, scale=scale))


def _local(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    is_causal: bool,
    first: int | None,
    scale: float | None,
) -> torch.Tensor:
    """The kernel's result for the queries from number `first` on."""
    if first is not None:
        mask, is_causal = _causal(q, k, first), False
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale)


def _causal(q: torch.Tensor, k: torch.Tensor, first: int) -> torch.Tensor:
    """Query `first + i` sees keys up to its own number."""
    return q.new_ones((q.shape[-2], k.shape[-2]), dtype=torch.bool).tril(first)


def _terms(query: int, key: int, value: int, masks: Sequence[int]) -> Contraction:
    """Samples and heads, whatever their number, broadcast; keys and features are whole."""
    lead = tuple(f"batch {dim}" for dim in range(max(query, key, value, *masks, 0) - 2))

    def labels(dims: int, *last: str) -> Labels:
        return (*lead[len(lead) - dims + 2 :], *last)

    operands = [labels(query, "query", "feature"), labels(key, "key", "feature"), labels(value, "key", "made")]
    operands += [labels(dims, "query", "key") if dims > 1 else ("key",) for dims in masks]
    return Contraction(tuple(operands), (*lead, "query", "made"), frozenset({"key", "feature", "made"}))


def _repeated_heads(x: Sharded, heads: int) -> Any:
    """Every head as often as queries share it."""
    tensor: Any = x
    times, shape = heads // x.shape[-3], [*x.shape]
    wide = tensor.unsqueeze(-3).expand(*shape[:-2], times, *shape[-2:])
    return wide.reshape(*shape[:-3], heads, *shape[-2:])


def _written_out(
    q: Any, k: Any, v: Any, masks: Sequence[Any], dropout_p: float, is_causal: bool, scale: float | None
) -> Sharded:
    """By its definition, with masks of dropout that depend on the global index."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores: Any = matrix_product(q * factor, k.transpose(-2, -1))
    if is_causal:
        masks = [torch.ones(*scores.shape[-2:], dtype=torch.bool, device=q.device).tril()]
    for mask in masks:
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights: Any = F.dropout(torch.softmax(scores, -1), dropout_p)
    return matrix_product(weights, v)
