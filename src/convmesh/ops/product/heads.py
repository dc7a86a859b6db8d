"""Split `F.multi_head_attention_forward`, for an nn.MultiheadAttention that was not traced into its parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from convmesh.errors import UnsupportedError
from convmesh.graph.tracing.multi_head import Looking, Projections, attended_tokens_first
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
    if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None or static_v is not None:
        raise UnsupportedError(
            "`MultiheadAttention`: add_bias_kv, add_zero_attn and static keys have no split version."
        )
    own = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else None
    weights = Projections(in_proj_weight, own, in_proj_bias, out_proj_weight, out_proj_bias)
    dropped = float(dropout_p) if training else 0.0
    looking = Looking(
        num_heads,
        embed_dim_to_check,
        dropped,
        key_padding_mask,
        attn_mask,
        is_causal,
        need_weights,
        average_attn_weights,
    )
    return attended_tokens_first(query, key, value, weights, looking)
