"""Stand-ins for a compiler's fused kernels: they read and write the same tensors, with arithmetic that costs nothing.

Fused kernels wait for memory. What tells them apart is what they read and write, in which formats, and over which dims
they sum; so one kernel of each form, compiled for the tensors at hand, stands for all that compilers make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from convmesh.private_torch.inductor import compile_graph

Tensors = Sequence[torch.Tensor]
Kernel = Callable[[Tensors, Tensors], list[torch.Tensor]]


def _joined(reads: Tensors) -> torch.Tensor:
    return reduce(torch.add, [tensor.to(torch.float32) for tensor in reads])


def _pointwise(reads: Tensors, writes: Tensors) -> list[torch.Tensor]:
    """Each element of the results from the same element of what is read."""
    value = _joined(reads)
    return [(value * (place + 1)).to(like.dtype) for place, like in enumerate(writes)]


def _moments(reads: Tensors, writes: Tensors) -> list[torch.Tensor]:
    """Mean and variance over the dims in which the results have extent 1."""
    value = _joined(reads)
    dims = [dim for dim, extent in enumerate(writes[0].shape) if extent == 1]
    return list(torch.var_mean(value, dims, correction=0, keepdim=True))[: len(writes)]


def _sums(reads: Tensors, writes: Tensors) -> list[torch.Tensor]:
    """Sums over these dims: of the first two values, and of their product with the others, as a norm's backward has it.

    What both sums share takes few loads: otherwise a compiler would write it to memory first.
    """
    first = _joined(reads[:2])
    product = first * _joined(reads[2:]) if len(reads) > 2 else first
    dims = [dim for dim, extent in enumerate(writes[0].shape) if extent == 1]
    values = [first, product, product.abs(), product.relu()]
    return [value.sum(dims, keepdim=True).to(like.dtype) for value, like in zip(values, writes, strict=False)]


def _rows(reads: Tensors, writes: Tensors) -> list[torch.Tensor]:
    """What is read, less its mean over the innermost dim."""
    value = _joined(reads)
    value = value - value.mean(-1, keepdim=True)
    return [(value * (place + 1)).to(like.dtype) for place, like in enumerate(writes)]


FORMS: dict[str, Kernel] = {
    "fused_pointwise": _pointwise,
    "fused_moments": _moments,
    "fused_sums": _sums,
    "fused_rows": _rows,
}


def fused_call(form: str) -> Callable[..., Callable[[], object]]:
    """Makes calls of a form, compiled, for the tensors that are read and written."""

    def make(reads: Any, writes: Any) -> Callable[[], object]:
        compiled = _compiled(form, reads, writes)
        return lambda: compiled(list(reads))

    return make


_known: dict[Any, Callable[[list[Any]], Any]] = {}
"""Compiled kernels, by form and tensors."""


def _compiled(form: str, reads: Tensors, writes: Tensors) -> Callable[[list[Any]], Any]:
    key = form, *((t.dtype, t.shape, t.stride()) for t in (*reads, *writes)), len(writes), reads[0].device
    if key not in _known:

        def run(*given: torch.Tensor) -> list[torch.Tensor]:
            return FORMS[form](given, writes)

        _known[key] = compile_graph(make_fx(run, tracing_mode="fake")(*reads), list(reads))
    return _known[key]
