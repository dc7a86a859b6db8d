"""The kernels behind `F.scaled_dot_product_attention`.

They also return the logarithm of each query's sum, without which partial results over parts of the keys cannot be
merged. And a dry run calls the kernel that would run: on tensors without data torch itself writes attention out.
"""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten

COUNTED_AS: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}
"""Kernels whose operations torch does not count, with others that have the same number."""

_IS_CAUSAL = "is_causal"


def skips_half(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a kernel call skips the keys that a causal mask hides, which torch counts all the same."""
    if "_attention" not in func.overloadpacket.__name__:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(given.get(_IS_CAUSAL, False))


def cpu_forward(q: Any, k: Any, v: Any, bias: Any, is_causal: bool, scale: float | None) -> tuple[Any, Any]:
    """Result and logarithms; a query that sees nothing has a result of zeros."""
    made, sums = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
    return made, sums


def cpu_backward(
    grad: Any, q: Any, k: Any, v: Any, made: Any, sums: Any, bias: Any, is_causal: bool, scale: float
) -> tuple[Any, Any, Any]:
    """Gradients of queries, keys and values, for results and sums over more keys than these."""
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = kernel(grad, q, k, v, made, sums, 0.0, is_causal, attn_mask=bias, scale=scale)
    return dq, dk, dv


def cuda_forward(q: Any, k: Any, v: Any, is_causal: bool, scale: float | None) -> tuple[Any, Any]:
    """The same on GPUs, without a mask."""
    made, sums, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
    return made, sums


def cuda_backward(
    grad: Any, q: Any, k: Any, v: Any, made: Any, sums: Any, is_causal: bool, scale: float
) -> tuple[Any, Any, Any]:
    """Its backward; the seeds are dropout's, of which there is none."""
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    kernel = _aten._scaled_dot_product_flash_attention_backward
    lengths = q.shape[-2], k.shape[-2]
    dq, dk, dv = kernel(
        grad, q, k, v, made, sums, None, None, *lengths, 0.0, is_causal, seed, unused, scale=scale
    )  # fmt: skip
    return dq, dk, dv


def without_data(q: Any, k: Any, v: Any, bias: Any, is_causal: bool, scale: float | None, device: str) -> Any:
    """The result of the kernel that torch uses on a kind of device, on tensors without data; None if it uses none."""
    alike = q.dim() == k.dim() == v.dim() == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2]
    is_small = q.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    if not alike or 0 in (*q.shape, *k.shape):
        return None
    if device == "cpu" and q.shape[-1] == v.shape[-1] and not (bias is not None and bias.requires_grad):
        return cpu_forward(q, k, v, bias, is_causal, scale)[0]
    if device != "cuda" or not is_small or q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return None
    if bias is None and q.dtype != torch.float32:
        return cuda_forward(q, k, v, is_causal, scale)[0]
    full = None if bias is None else bias.expand(*q.shape[:-1], k.shape[-2])
    return _aten._scaled_dot_product_efficient_attention(q, k, v, full, True, 0.0, is_causal, scale=scale)[0]
