"""Split `scaled_dot_product_attention`.

Samples, heads and queries stay cut as they come; keys and values of this rank's samples and heads are gathered, so the
local kernels (flash, memory-efficient) stay in use. With dropout the product is written out, since those kernels draw
their own masks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from convmesh.kernels.attention_blocks import whole_attention
from convmesh.layout import Layout
from convmesh.ops.core.mask_seeds import next_seed
from convmesh.ops.core.probe import probe, unseen
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded, on_mesh
from convmesh.ops.product.contraction import Arrangement, Contraction, Labels, arrangement, contract, fetched
from convmesh.ops.product.products import matrix_product
from convmesh.ops.product.ring import Dropped, Ring, RingFunction
from convmesh.ops.product.ring_turns import turns

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
    queries, keys, values = (probe(x) for x in (query, key, value))
    with unseen():
        F.scaled_dot_product_attention(queries, keys, values, mask, 0.0, **options)
    mesh = next(x.mesh for x in (query, key, value, attn_mask) if isinstance(x, Sharded))
    q, k, v = (on_mesh(x, mesh) for x in (query, key, value))
    masks = [] if attn_mask is None else [on_mesh(attn_mask, mesh)]
    if enable_gqa and q.shape[-3] != k.shape[-3]:
        k, v = (_repeated_heads(x, q.shape[-3]) for x in (k, v))
    rounds = ring_of(q, k, v, masks)
    if rounds is not None:
        return ring_attention(rounds, (q, k, v, *masks), dropout_p, is_causal, scale)
    if dropout_p > 0:
        return _written_out(q, k, v, masks, dropout_p, is_causal, scale)
    return _attention(q, k, v, masks, is_causal, scale)


def ring_of(q: Sharded, k: Sharded, v: Sharded, masks: Sequence[Sharded]) -> Arrangement | None:
    """How attention is cut if keys and values go round the ring; None if they are gathered, or need not travel.

    They go round if the plan says so and the axes that cut their tokens cut the queries' too.
    """
    if q.mesh.settings.attention != "ring" or q.dim() < 3 or len({x.dim() for x in (q, k, v)}) > 1:
        return None
    given = tuple(x.layout for x in (q, k, v, *masks))
    plan = arrangement(_terms(q.dim(), k.dim(), v.dim(), [mask.dim() for mask in masks]), given)
    keys, values, rows = k.layout.cuts[-2], v.layout.cuts[-2], plan.operands[0].cuts[-2]
    if not keys.axes or keys != values or keys.axes != rows.axes:
        return None
    both = (layout.replacing({q.dim() - 2: keys}) for layout in plan.operands[1:3])
    return plan._replace(operands=(plan.operands[0], *both, *plan.operands[3:]))


def ring_attention(
    plan: Arrangement, operands: Sequence[Sharded], dropout_p: float, is_causal: bool, scale: float | None
) -> Sharded:
    """The same with keys and values that go round the ring."""
    mesh, features = operands[0].mesh, operands[1].shape[-1]
    work = {*plan.result.axes}
    q, k, v, *masks = (fetched(x, layout, work) for x, layout in zip(operands, plan.operands, strict=True))
    box = plan.result.box(mesh.rank)
    shape = (*plan.result.shape[:-1], operands[1].shape[-2])
    ring = Ring(
        mesh=mesh,
        turns=turns(_joined(plan.operands[1], plan.operands[2]), plan.result.cuts[-2].partition, is_causal, mesh.rank),
        rows=box.spans[-2],
        is_causal=is_causal,
        scale=1 / math.sqrt(features) if scale is None else scale,
        key_features=features,
        device=operands[0].device_kind,
        learns_bias=bool(masks) and masks[0].requires_grad,
        dropped=Dropped(dropout_p, next_seed(mesh), box.spans[:-2], shape) if dropout_p > 0 else None,
    )
    made = RingFunction.apply(q, torch.cat([k, v], -1), masks[0] if masks else None, ring)
    return Sharded(made, plan.result, mesh)


def _joined(keys: Layout, values: Layout) -> Layout:
    """The layout of keys and values as one tensor."""
    return keys.with_shape((*keys.shape[:-1], keys.shape[-1] + values.shape[-1]))


def _attention(
    q: Sharded, k: Sharded, v: Sharded, masks: Sequence[Sharded], is_causal: bool, scale: float | None
) -> Sharded:
    terms = _terms(q.dim(), k.dim(), v.dim(), [mask.dim() for mask in masks])
    plan = arrangement(terms, tuple(x.layout for x in (q, k, v, *masks)))
    rows = plan.operands[0].box(q.mesh.rank).spans[-2]
    first = rows.start if is_causal and rows.extent < q.shape[-2] else None
    local = partial(_local, is_causal=is_causal, first=first, scale=scale, device=q.device_kind)
    return contract(terms, [q, k, v, *masks], local)


def _local(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    is_causal: bool,
    first: int | None,
    scale: float | None,
    device: str,
) -> torch.Tensor:
    """The kernel's result for the queries from number `first` on."""
    if first is not None:
        mask, is_causal = _causal(q, k, first), False
    return whole_attention(q, k, v, mask, is_causal, scale, device)


def _causal(q: torch.Tensor, k: torch.Tensor, first: int) -> torch.Tensor:
    """Query `first + i` sees keys up to its own number."""
    return q.new_ones((q.shape[-2], k.shape[-2]), dtype=torch.bool).tril(first)


def _terms(query: int, key: int, value: int, masks: Sequence[int]) -> Contraction:
    """Any dims of samples and heads broadcast; keys and features are whole."""
    lead = tuple(f"batch {dim}" for dim in range(max(query, key, value, *masks, 0) - 2))

    def labels(dims: int, *last: str) -> Labels:
        return (*lead[len(lead) - dims + 2 :], *last)

    operands = [labels(query, "query", "feature"), labels(key, "key", "feature"), labels(value, "key", "made")]
    operands += [labels(dims, "query", "key") if dims > 1 else ("key",) for dims in masks]
    return Contraction(tuple(operands), (*lead, "query", "made"), frozenset({"key", "feature", "made"}))


def _repeated_heads(x: Sharded, heads: int) -> Any:
    """Every head repeated for the queries that share it."""
    tensor: Any = x
    times, shape = heads // x.shape[-3], [*x.shape]
    wide = tensor.unsqueeze(-3).expand(*shape[:-2], times, *shape[-2:])
    return wide.reshape(*shape[:-3], heads, *shape[-2:])


def _written_out(
    q: Any, k: Any, v: Any, masks: Sequence[Any], dropout_p: float, is_causal: bool, scale: float | None
) -> Sharded:
    """Attention by its definition, with dropout masks that depend on the global index."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores: Any = matrix_product(q * factor, k.transpose(-2, -1))
    if is_causal:
        masks = [torch.ones(*scores.shape[-2:], dtype=torch.bool, device=q.device).tril()]
    for mask in masks:
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights: Any = F.dropout(torch.softmax(scores, -1), dropout_p)
    return matrix_product(weights, v)
