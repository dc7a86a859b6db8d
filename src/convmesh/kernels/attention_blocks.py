"""Attention of some queries to some keys, as one part of a result over all keys.

A block gives its result and the logarithm of each query's sum of exponentials, by which results of several blocks are
merged (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). Backward of a block needs only the
merged result and sums (Dao et al., "FlashAttention", 2022, appendix B), so no scores are kept.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from convmesh.private_torch import attention_kernels

Tensor = torch.Tensor


class KeyBlock(NamedTuple):
    """How queries look at some keys."""

    scale: float
    bias: Tensor | None = None
    """Added to the scores; minus infinity hides a key."""
    is_causal: bool = False
    """Whether query i sees keys up to i, with as many keys as queries."""
    keep: Tensor | None = None
    """The scores that dropout keeps."""
    keeps: float = 1.0
    """The probability that dropout keeps a score."""
    learns_bias: bool = False


class Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, block: KeyBlock, device: str) -> tuple[Tensor, Tensor]:
    """Result and logarithms of sums; minus infinity for a query that sees nothing. `device` is the kind of device."""
    kernel = _kernel(q, k, v, block, device)
    if kernel == "cuda":
        return attention_kernels.cuda_forward(q, k, v, block.is_causal, block.scale)
    if kernel == "cpu":
        made, sums = attention_kernels.cpu_forward(q, k, v, _full(block, q, k), block.is_causal, block.scale)
        return made, sums if block.bias is None else _told_hidden(sums, block.bias)
    return _written(q, k, v, block)


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, made: Tensor, sums: Tensor, block: KeyBlock, device: str
) -> Gradients:
    """The part of all gradients that comes through this block; `made` and `sums` are merged over all blocks."""
    kernel = _kernel(q, k, v, block, device)
    if kernel == "cuda":
        return Gradients(*attention_kernels.cuda_backward(grad, q, k, v, made, sums, block.is_causal, block.scale))
    if kernel == "cpu":
        seen = sums.masked_fill(sums == -math.inf, 0.0)
        return Gradients(
            *attention_kernels.cpu_backward(grad, q, k, v, made, seen, _full(block, q, k), block.is_causal, block.scale)
        )
    return _written_gradients(grad, q, k, v, made, sums, block)


def whole_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, device: str
) -> Tensor:
    """torch's attention to all keys; a dry run names the kernel that the device has for it."""
    if q.is_meta:
        bias = mask
        if mask is not None and mask.dtype == torch.bool:
            bias = q.new_zeros(mask.shape).masked_fill(mask.logical_not(), -math.inf)
        made: Tensor | None = attention_kernels.without_data(q, k, v, bias, is_causal, scale, device)
        if made is not None:
            return made
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale)


def merged(made: Tensor, sums: Tensor, other: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Two results over different keys as one over both."""
    both = torch.logaddexp(sums, others)
    base = both.masked_fill(both == -math.inf, 0.0)
    here, there = (torch.exp(part - base).unsqueeze(-1).to(made.dtype) for part in (sums, others))
    return made * here + other.to(made.dtype) * there, both


def _kernel(q: Tensor, k: Tensor, v: Tensor, block: KeyBlock, device: str) -> str:
    """The fused kernel to use; empty for what none of them supports."""
    alike = q.dim() == k.dim() == v.dim() == 4 and q.shape[-1] == v.shape[-1] and q.shape[:2] == k.shape[:2]
    if not alike or block.keep is not None or block.learns_bias or not q.numel():
        return ""
    if device == "cuda":
        fits = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
        return "cuda" if fits and block.bias is None else ""
    fits = block.bias is None or (block.bias.dim() in (2, 4) and block.bias.dtype == q.dtype)
    return "cpu" if device == "cpu" and fits and not (block.is_causal and block.bias is not None) else ""


def _full(block: KeyBlock, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias expanded to all samples and heads, unless it has only queries and keys."""
    if block.bias is None or block.bias.dim() == 2:
        return block.bias
    return block.bias.expand(*q.shape[:-1], k.shape[-2])


def _told_hidden(sums: Tensor, bias: Tensor) -> Tensor:
    """Sums with minus infinity for queries that see nothing, where the kernel returns zeros."""
    return sums.masked_fill((bias == -math.inf).all(-1), -math.inf)


def _written(q: Tensor, k: Tensor, v: Tensor, block: KeyBlock) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, block)
    sums = scores.logsumexp(-1)
    weights = _weights(scores, sums)
    if block.keep is not None:
        weights = weights * block.keep / block.keeps
    return (weights @ v.to(weights.dtype)).to(q.dtype), sums


def _written_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, made: Tensor, sums: Tensor, block: KeyBlock
) -> Gradients:
    scores = _scores(q, k, block)
    weights, wide = _weights(scores, sums), scores.dtype
    out, k_wide, q_wide = grad.to(wide), k.to(wide), q.to(wide)
    of_weights, used = out @ v.to(wide).mT, weights
    if block.keep is not None:
        of_weights, used = of_weights * block.keep / block.keeps, weights * block.keep / block.keeps
    of_scores = weights * (of_weights - (out * made.to(wide)).sum(-1, keepdim=True))
    dq, dk, dv = (of_scores @ k_wide) * block.scale, (of_scores.mT @ q_wide) * block.scale, used.mT @ out
    bias = None
    if block.bias is not None and block.learns_bias:
        bias = of_scores.sum_to_size(block.bias.shape).to(block.bias.dtype)
    return Gradients(_like(dq, q), _like(dk, k), _like(dv, v), bias)


def _like(gradient: Tensor, of: Tensor) -> Tensor:
    """The gradient in the tensor's shape, summed over samples and heads that share it, and in its type."""
    return gradient.sum_to_size(of.shape).to(of.dtype)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """A type of at least four bytes."""
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


def _scores(q: Tensor, k: Tensor, block: KeyBlock) -> Tensor:
    """Scores in at least four bytes, since they are exponents."""
    wide = wide_type(q.dtype)
    scores = (q.to(wide) @ k.to(wide).mT) * block.scale
    if block.is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores if block.bias is None else scores + block.bias


def _weights(scores: Tensor, sums: Tensor) -> Tensor:
    return torch.exp(scores - sums.masked_fill(sums == -math.inf, 0.0).unsqueeze(-1))
