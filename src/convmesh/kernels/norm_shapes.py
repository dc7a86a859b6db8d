"""Meta kernels for torch's batch-norm operators, for dry runs: torch does not register any."""

from __future__ import annotations

import torch

from convmesh.private_torch.dispatching import has_meta_kernel

_LIBRARY = torch.library.Library("aten", "IMPL", "Meta")


def _update_stats(
    x: torch.Tensor, running_mean: torch.Tensor | None, running_var: torch.Tensor | None, momentum: float
) -> tuple[torch.Tensor, torch.Tensor]:
    del running_var, momentum
    dtype = running_mean.dtype if running_mean is not None else _sums(x)
    return x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)


def _backward_reduce(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    *wanted: bool,
) -> tuple[torch.Tensor, ...]:
    del x, invstd, weight
    return tuple(mean.new_empty(grad.shape[1] if wants else 0) for wants in (wanted[0], wanted[0], *wanted[1:]))


def _backward_elemt(grad: torch.Tensor, x: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    del others
    return torch.empty_like(x, dtype=grad.dtype)


def _sums(x: torch.Tensor) -> torch.dtype:
    """The type in which GPUs sum."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


_KERNELS = {
    "batch_norm_update_stats": _update_stats,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _backward_elemt,
}
for _name, _kernel in _KERNELS.items():
    if not has_meta_kernel(_name):
        _LIBRARY.impl(_name, _kernel)
