"""`x.new_zeros(...)` and similar methods: a small tensor made from a sharded one, plain and whole on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded

_T = torch.Tensor


def _register(function: Callable[..., Any]) -> None:
    @implements(function)
    def split(x: Sharded, *args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = function(x.local, *args, **kwargs)
        return made


for _function in (_T.new_zeros, _T.new_ones, _T.new_full, _T.new_empty, _T.new_tensor):
    _register(_function)
