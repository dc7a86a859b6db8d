"""How far two tensors are apart."""

from __future__ import annotations

import torch


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of two tensors; infinities and NaNs must be in the same places."""
    if actual.shape != expected.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    actual, expected = _wide(actual), _wide(expected)
    same = torch.isclose(actual, expected, rtol=0, atol=0, equal_nan=True)
    furthest = torch.where(same, 0.0, actual - expected).abs().max().item()
    return furthest if furthest == furthest else float("inf")


def size_of(tensor: torch.Tensor) -> float:
    """The largest finite absolute value; 1 for a tensor of zeros."""
    values = _wide(tensor.detach())
    return torch.where(values.isfinite(), values, 0.0).abs().max().item() or 1.0 if values.numel() else 1.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()
