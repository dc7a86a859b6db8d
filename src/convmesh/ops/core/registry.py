"""Which split operator stands in for which torch function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from convmesh.errors import UnsupportedError

Handler = TypeVar("Handler", bound=Callable[..., Any])

_handlers: dict[Callable[..., Any], Callable[..., Any]] = {}
_take_cut_weights: set[Callable[..., Any]] = set()


def implements(*functions: Callable[..., Any], takes_cut_weights: bool = False) -> Callable[[Handler], Handler]:
    """Register the split version of torch functions; it takes their arguments, with `Sharded` in place of tensors.

    Only one that `takes_cut_weights` is ever given a DTensor.
    """

    def register(handler: Handler) -> Handler:
        for function in functions:
            _handlers[function] = handler
            if takes_cut_weights:
                _take_cut_weights.add(function)
        return handler

    return register


def handler_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The split version of a torch function, or one error that says what there is."""
    if function in _handlers:
        return _handlers[function]
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", str(function))
    raise UnsupportedError(
        f"`{name}` has no split version, so it cannot run on a Sharded tensor. Use one of: {', '.join(supported())}; "
        "or gather the tensor first with `x.gather()`."
    )


def has_handler(function: Callable[..., Any]) -> bool:
    return function in _handlers


def takes_cut_weights(function: Callable[..., Any]) -> bool:
    return function in _take_cut_weights


def supported() -> list[str]:
    """The names of the torch functions that run on `Sharded` tensors."""
    names = {str(getattr(f, "__name__", f)) for f in _handlers}
    return sorted(name for name in names if not name.startswith("_"))


def tensor_method(name: str) -> Callable[..., Any] | None:
    """The split version of the `torch.Tensor` method called `name`."""
    method = getattr(torch.Tensor, name, None)
    try:
        return _handlers.get(method) if method is not None else None
    except TypeError:  # an unhashable descriptor is no method of ours
        return None
