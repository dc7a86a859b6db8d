"""nn.MultiheadAttention written out as its parts: projections, heads, attention, projection.

It uses torch's own functions, so it works on anything that knows those: a trace records a dense layer for each
projection, which plans cut like any other, and cut tensors run it unchanged.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

Weight = torch.Tensor | None


class Projections(NamedTuple):
    """The weights of an attention: one matrix of three blocks, or one matrix each for queries, keys and values."""

    fused: Weight
    own: tuple[Weight, ...] | None
    bias: Weight
    out: torch.Tensor
    out_bias: Weight


class Looking(NamedTuple):
    """How queries look at keys."""

    heads: int
    features: int
    dropped: Any = 0.0
    padding: Any = None
    mask: Any = None
    is_causal: bool = False
    tells: bool = True
    """Whether it returns the attention weights: how much every query looks at every key."""
    averages: bool = True
    """Whether those are averaged over heads."""


def is_plain(module: nn.Module) -> bool:
    """Whether a module is torch's attention with nothing added to its keys."""
    if type(module) is not nn.MultiheadAttention:
        return False
    return module.bias_k is None and module.bias_v is None and not module.add_zero_attn


def attend(
    module: Any,
    training: Any,
    query: Any,
    key: Any,
    value: Any,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """The forward of an attention that `is_plain`; `training` turns its dropout on."""
    own = None if module.in_proj_weight is not None else (
        module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    )  # fmt: skip
    weights = Projections(module.in_proj_weight, own, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias)
    dropped = module.dropout * training if module.dropout else 0.0
    looking = Looking(
        module.num_heads, module.embed_dim, dropped, key_padding_mask, attn_mask, is_causal, need_weights,
        average_attn_weights,
    )  # fmt: skip
    if query.dim() == 2:
        return _of_one_sample(query, key, value, weights, looking)
    if module.batch_first:
        return attended(query, key, value, weights, looking)
    return attended_tokens_first(query, key, value, weights, looking)


def attended_tokens_first(query: Any, key: Any, value: Any, weights: Projections, looking: Looking) -> tuple[Any, Any]:
    """The same for tensors of (tokens, samples, features), or without samples."""
    if query.dim() == 2:
        return _of_one_sample(query, key, value, weights, looking)
    made, told = attended(*_each_once(lambda x: x.transpose(0, 1), query, key, value), weights, looking)
    return made.transpose(0, 1), told


def _of_one_sample(query: Any, key: Any, value: Any, weights: Projections, looking: Looking) -> tuple[Any, Any]:
    if looking.padding is not None:
        looking = looking._replace(padding=looking.padding.unsqueeze(0))
    made, told = attended(*_each_once(lambda x: x.unsqueeze(0), query, key, value), weights, looking)
    return made.squeeze(0), None if told is None else told.squeeze(0)


def _each_once(change: Any, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Change each distinct tensor once: a tensor shared by two arguments stays shared, as one product projects it."""
    queries = change(query)
    keys = queries if key is query else change(key)
    return queries, keys, keys if value is key else queries if value is query else change(value)


def attended(query: Any, key: Any, value: Any, weights: Projections, looking: Looking) -> tuple[Any, Any]:
    """Attention over tensors of (samples, tokens, features), and the attention weights if they are asked for."""
    q, k, v = (_by_heads(x, looking.heads) for x in _projected((query, key, value), weights))
    mask = _mask(looking, q)
    if looking.tells:
        made, told = _with_weights(q, k, v, mask, looking)
        told = told.mean(1) if looking.averages else told
    else:
        is_causal = looking.is_causal and mask is None
        made, told = F.scaled_dot_product_attention(q, k, v, mask, looking.dropped, is_causal), None
    return F.linear(made.transpose(1, 2).flatten(2), weights.out, weights.out_bias), told


def _with_weights(q: Any, k: Any, v: Any, mask: Any, looking: Looking) -> tuple[Any, Any]:
    """Attention written out."""
    scores = (q * math.sqrt(looking.heads / looking.features)) @ k.transpose(-2, -1)
    weights: Any = torch.softmax(scores if mask is None else scores + mask, -1)
    dropped = looking.dropped
    is_dropped = not isinstance(dropped, float) or dropped > 0
    return (F.dropout(weights, dropped) if is_dropped else weights) @ v, weights


def _projected(given: tuple[Any, Any, Any], weights: Projections) -> Any:
    """Queries, keys and values: in one product if they come from one tensor."""
    own, bias = weights.own, weights.bias
    if own is None:
        assert weights.fused is not None
        if given[0] is given[1] is given[2]:
            return F.linear(given[0], weights.fused, bias).chunk(3, -1)
        own = weights.fused.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip(given, own, biases, strict=True)]  # type: ignore[arg-type]


def _by_heads(x: Any, heads: int) -> Any:
    """(samples, tokens, features) as (samples, heads, tokens, features of a head)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _mask(looking: Looking, q: Any) -> Any:
    """What both masks together add to the scores."""
    mask = None if looking.mask is None else _added(looking.mask, q)
    if mask is not None and mask.dim() == 3:  # one for every sample and head
        mask = mask.unflatten(0, (mask.shape[0] // looking.heads, looking.heads))
    if looking.padding is None:
        return mask
    padding = _added(looking.padding, q)[:, None, None, :]
    return padding if mask is None else mask + padding


def _added(mask: Any, q: Any) -> Any:
    """A mask as what it adds to the scores: a boolean one hides the keys where it is True."""
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -math.inf)
