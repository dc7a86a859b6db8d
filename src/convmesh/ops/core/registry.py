"""Which split operator stands in for which torch function."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.overrides import resolve_name

from convmesh.errors import UnsupportedError

Function = Callable[..., Any]
Handler = TypeVar("Handler", bound=Function)

_handlers: dict[Function, Function] = {}
_take_cut_weights: set[Function] = set()
_take_folded: set[Function] = set()


def implements(
    *functions: Function, takes_cut_weights: bool = False, takes_folded: bool = False
) -> Callable[[Handler], Handler]:
    """Register the split version of torch functions; it takes their arguments, with `Sharded` in place of tensors.

    Only a handler that `takes_cut_weights` ever receives a DTensor, and only one that `takes_folded` a tensor with a
    folded layout: others get it with its last dim in one piece.
    """

    def register(handler: Handler) -> Handler:
        for function in functions:
            _handlers[function] = handler
            if takes_cut_weights:
                _take_cut_weights.add(function)
            if takes_folded:
                _take_folded.add(function)
        return handler

    return register


def handler_of(function: Function) -> Function:
    """The split version of a torch function; UnsupportedError if there is none."""
    if function in _handlers:
        return _handlers[function]
    name = name_of(function)
    near = difflib.get_close_matches(listed_name(function).rpartition(".")[2], supported(), n=1)
    alike = f"; `{near[0]}` has one" if near else ""
    raise UnsupportedError(
        f"`{name}` has no split version, so it cannot run on a Sharded tensor{alike}. `convmesh.ops.supported()` lists "
        "all that have one; or gather the tensor first with `x.gather()`."
    )


def name_of(function: Function) -> str:
    """A torch function's name as users write it: `max_pool2d`, `Tensor.add`, `linalg.norm`."""
    # Functions such as F.max_pool2d are dispatchers that are all called `fn`; torch knows where each one is exported.
    if exported := resolve_name(function):
        return str(exported).removeprefix("torch.").removeprefix("nn.").removeprefix("functional.")
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", str(function))
    owner, _, last = str(name).rpartition(".")
    return f"Tensor.{last}" if owner in ("Tensor", "TensorBase") else last


def has_handler(function: Function) -> bool:
    return function in _handlers


def takes_cut_weights(function: Function) -> bool:
    return function in _take_cut_weights


def takes_folded(function: Function) -> bool:
    return function in _take_folded


def handled() -> list[Function]:
    """The torch functions that have a split version."""
    return list(_handlers)


def supported() -> list[str]:
    """Their names; `relu` stands for `relu_` too."""
    names = {listed_name(function) for function in _handlers}
    return sorted(n for n in names if not n.startswith("_") and not (n.endswith("_") and n[:-1] in names))


def listed_name(function: Function) -> str:
    """The name in lists, where a function and the method of the same name appear once."""
    return name_of(function).removeprefix("Tensor.")


def tensor_method(name: str) -> Function | None:
    """The `torch.Tensor` method called `name`, if it has a split version."""
    method: Function | None = getattr(torch.Tensor, name, None)
    try:
        return method if method in _handlers else None
    except TypeError:  # an unhashable descriptor is not a method
        return None
