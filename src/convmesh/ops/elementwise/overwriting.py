"""Methods that change their tensor, `x.add_(y)`: the function's result takes the tensor's place under all its names.

The shard's memory may belong to another tensor too, so it is not overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from convmesh.ops.core.broadcast import line_up
from convmesh.ops.core.operators import take_place
from convmesh.ops.core.registry import handler_of, has_handler, implements
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.elementwise.pointwise import LINED_UP, UNARY

_T = torch.Tensor


def _changed(handler: Callable[..., Any], name: str, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, Sharded):  # a plain tensor, such as a buffer, takes all of a sharded one, on every rank
        return x.copy_(handler(x, *args, **kwargs).gather())
    take_place(x, handler(x, *args, **kwargs), f"x.{name}_(...)", f"x = x.{name}(...)")
    return x


def _register() -> None:
    names = dict.fromkeys(getattr(function, "__name__", "") for function in (*UNARY, *LINED_UP))
    for name in names:
        plain = getattr(_T, name, None) or getattr(torch, name, None) or getattr(F, name, None)
        if plain is None or not has_handler(plain):
            continue
        for owner in (_T, torch, F):
            function = getattr(owner, f"{name}_", None)
            if callable(function) and not has_handler(function):
                implements(function)(partial(_changed, handler_of(plain), name))


_register()


@implements(_T.zero_)
def zero_in_place(x: Sharded) -> Sharded:
    x.local = torch.zeros_like(x.local)
    return x


@implements(_T.fill_)
def fill_in_place(x: Sharded, value: Any) -> Sharded:
    take_place(x, torch.zeros_like(x) + value, "x.fill_(value)", "x = value")  # type: ignore[arg-type]
    return x


@implements(_T.copy_)
def copy_in_place(x: Any, src: Any, non_blocking: bool = False) -> Any:
    """The values of another tensor, in the type and layout of this one."""
    del non_blocking
    if not isinstance(x, Sharded):
        return x.copy_(src.gather())
    operands, layout, _ = line_up(x, src)
    copied = Sharded(operands[1].expand(operands[0].shape).to(x.dtype), layout, x.mesh)
    take_place(x, copied.redistribute(x.layout), "x.copy_(y)", "x = y")
    return x
