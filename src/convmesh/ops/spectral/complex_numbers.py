"""Complex numbers: made from two tensors, taken apart, and viewed as pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from convmesh.ops.core.broadcast import line_up
from convmesh.ops.core.probe import probe
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.shape.along import local_result
from convmesh.ops.shape.reshape import make_whole

_T = torch.Tensor

PARTS: tuple[Callable[..., Any], ...] = (
    torch.real, torch.imag, torch.conj, _T.conj, torch.angle, _T.angle, torch.resolve_conj, _T.resolve_conj,
    torch.conj_physical, _T.conj_physical,
)  # fmt: skip


def _register_part(function: Callable[..., Any]) -> None:
    @implements(function)
    def split(x: Sharded) -> Sharded:
        return x.like(function(x.local))


for _function in PARTS:
    _register_part(_function)


def _register_pair(function: Callable[..., Any]) -> None:
    @implements(function)
    def split(first: Any, second: Any) -> Sharded:
        operands, layout, mesh = line_up(first, second)
        return Sharded(function(*operands), layout, mesh)


for _function in (torch.complex, torch.polar):
    _register_pair(_function)


@implements(torch.view_as_real)
def view_as_real(input: Sharded) -> Any:  # noqa: A002 - torch's name
    """The real and the imaginary part along a new last dim."""
    return local_result(input, torch.view_as_real)


@implements(torch.view_as_complex)
def view_as_complex(input: Sharded) -> Any:  # noqa: A002
    """Pairs along the last dim, made whole first, as complex numbers."""
    torch.view_as_complex(probe(input))
    whole = make_whole(input, [input.dim() - 1])
    return local_result(whole, lambda pairs: torch.view_as_complex(pairs.contiguous()))


@implements(torch.is_complex)
def is_complex(input: Sharded) -> bool:  # noqa: A002
    return input.dtype.is_complex
