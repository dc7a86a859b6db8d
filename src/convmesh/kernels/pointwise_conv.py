"""Convolution with a single tap on a CPU: a matrix product over channels, in the input's own format."""

from __future__ import annotations

import torch
import torch.nn.functional as F

FEW_COLUMNS = 100
"""Below this many indices per sample, one product over all samples beats one per sample despite its copies: tenfold
for 4 indices on an EPYC core; for 256 the copies cost a fifth."""


def pointwise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The convolution: each filter's value at an index depends only on the channels there."""
    matrix = weight.flatten(1)
    if x.is_contiguous():
        y = _product(matrix, x.flatten(2))
        y = y if bias is None else y.add_(bias.view(-1, 1))
        return y.view(x.shape[0], weight.shape[0], *x.shape[2:])
    return F.linear(x.movedim(1, -1), matrix, bias).movedim(-1, 1)


def pointwise_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of input and weight, None for those not `wanted`; the input's in the input's format."""
    matrix = weight.flatten(1)
    if x.is_contiguous():
        rows, grad_rows = x.flatten(2), grad.flatten(2)
        dx = _product(matrix.t(), grad_rows).view(x.shape) if wanted[0] else None
        dw = _outer(grad_rows, rows) if wanted[1] else None
    else:
        rows, grad_rows = (t.movedim(1, -1).flatten(0, -2) for t in (x, grad))
        dx = (grad.movedim(1, -1) @ matrix).movedim(-1, 1) if wanted[0] else None
        dw = grad_rows.t() @ rows if wanted[1] else None
    return dx, None if dw is None else dw.view(weight.shape)


def _product(matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """F×C times N×C×S: N×F×S."""
    if not _has_few_columns(x):
        return torch.bmm(matrix.expand(len(x), *matrix.shape), x)
    return (matrix @ _folded(x)).view(len(matrix), len(x), -1).transpose(0, 1).contiguous()


def _outer(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """N×F×S times N×C×S: F×C, summed over samples and indices."""
    return _folded(y) @ _folded(x).t() if _has_few_columns(x) else torch.bmm(y, x.mT).sum(0)


def _folded(x: torch.Tensor) -> torch.Tensor:
    """N×C×S as C×NS."""
    return x.transpose(0, 1).reshape(x.shape[1], -1)


def _has_few_columns(x: torch.Tensor) -> bool:
    return len(x) > 1 and x.shape[2] < FEW_COLUMNS
