"""Split `F.multi_head_attention_forward`, which nn.MultiheadAttention calls: projections, attention, projection."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from convmesh.errors import UnsupportedError
from convmesh.ops.core.registry import implements

Weight = torch.Tensor | None


@implements(F.multi_head_attention_forward)
def multi_head_attention_forward(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Weight,
    in_proj_bias: Weight,
    bias_k: Weight,
    bias_v: Weight,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: torch.Tensor,
    out_proj_bias: Weight,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Weight = None,
    k_proj_weight: Weight = None,
    v_proj_weight: Weight = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """Tensors of (tokens, samples, features), or without samples."""
    del embed_dim_to_check
    if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None or static_v is not None:
        raise UnsupportedError(
            "`MultiheadAttention`: add_bias_kv, add_zero_attn and static keys have no split version."
        )
    if query.dim() == 2:
        of_one = (query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1))
        padding = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        settings = (training, padding, need_weights, attn_mask, use_separate_proj_weight)
        made, told = multi_head_attention_forward(
            *of_one, 0, num_heads, in_proj_weight, in_proj_bias, None, None, False, dropout_p, out_proj_weight,
            out_proj_bias, *settings, q_proj_weight, k_proj_weight, v_proj_weight, None, None, average_attn_weights,
            is_causal,
        )  # fmt: skip
        return made.squeeze(1), None if told is None else told.squeeze(0)
    own = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else None
    projected = _projected((query, key, value), in_proj_weight, own, in_proj_bias)
    q, k, v = (_by_heads(x, num_heads) for x in projected)
    mask, dropped = _mask(attn_mask, key_padding_mask, num_heads, q), dropout_p if training else 0.0
    if need_weights:
        made, told = _with_weights(q, k, v, mask, dropped)
        told = told.mean(1) if average_attn_weights else told
    else:
        made, told = F.scaled_dot_product_attention(q, k, v, mask, dropped, is_causal and mask is None), None
    return F.linear(made.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias), told


def _with_weights(q: Any, k: Any, v: Any, mask: Any, dropped: float) -> tuple[Any, Any]:
    """Attention written out, and how much every query looks at every key."""
    scores = (q * (1 / math.sqrt(q.shape[-1]))) @ k.transpose(-2, -1)
    weights: Any = torch.softmax(scores if mask is None else scores + mask, -1)
    return (F.dropout(weights, dropped) if dropped else weights) @ v, weights


def _projected(given: tuple[Any, Any, Any], weight: Weight, own: tuple[Weight, ...] | None, bias: Weight) -> Any:
    """Queries, keys and values: in one product where they come from one tensor."""
    if own is None:
        assert weight is not None
        if given[0] is given[1] is given[2]:
            return F.linear(given[0], weight, bias).chunk(3, -1)
        own = weight.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip(given, own, biases, strict=True)]  # type: ignore[arg-type]


def _by_heads(x: Any, heads: int) -> Any:
    """(tokens, samples, features) as (samples, heads, tokens, features of a head)."""
    return x.unflatten(-1, (heads, x.shape[-1] // heads)).permute(1, 2, 0, 3)


def _mask(attn_mask: Any, key_padding_mask: Any, heads: int, q: Any) -> Any:
    """What is added to the scores, for both masks together."""
    mask = None if attn_mask is None else _added(attn_mask, q)
    if mask is not None and mask.dim() == 3:  # one for every sample and head
        mask = mask.unflatten(0, (mask.shape[0] // heads, heads))
    if key_padding_mask is None:
        return mask
    padding = _added(key_padding_mask, q)[:, None, None, :]
    return padding if mask is None else mask + padding


def _added(mask: Any, q: Any) -> Any:
    """Where a mask of truth says True, nothing is seen."""
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -math.inf)
