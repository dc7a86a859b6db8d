"""torch's questions about sizes that may be symbols, answered for plain numbers.

Its shape functions ask them one by one, each time importing them from a module that takes a third of a second to load,
most of it for sympy. Where nothing is compiled, sizes are numbers: the question then is its own answer, and the modules
themselves are loaded only if anything else in them is needed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial, reduce
from operator import and_, or_
from types import ModuleType
from typing import Any

import torch
import torch.fx.experimental

_SYMBOLS, _ALGEBRA = "torch.fx.experimental.symbolic_shapes", "sympy"


class _StandIn(ModuleType):
    """Stands in for a module, and defers to it for what it lacks. Functions are looked up more often than called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import itself asks, not for the module's contents
            raise AttributeError(name)
        is_function = name.islower() and self.__name__ == _SYMBOLS
        return partial(_ask, name) if is_function else getattr(_real(self.__name__), name)


def leave_out_symbols() -> None:
    """Answer for plain numbers from here on; for processes that compile nothing and run only our own code.

    Does nothing if sympy is already loaded.
    """
    if _SYMBOLS in sys.modules or _ALGEBRA in sys.modules:
        return
    answers, algebra = _StandIn(_SYMBOLS), _StandIn(_ALGEBRA)
    for name in ("guard_or_false", "guard_or_true", "statically_known_true", "expect_true"):
        setattr(answers, name, _answer(name))
    answers.__dict__.update(sym_and=_all, sym_or=_any, sym_eq=_equal, is_nested_int=_is_nested)
    answers.__dict__.update(free_unbacked_symbols=_symbols_in)
    algebra.__dict__.update(Basic=_Symbol)
    sys.modules[_SYMBOLS], sys.modules[_ALGEBRA] = answers, algebra
    torch.fx.experimental.symbolic_shapes = answers


def _real(name: str) -> Any:
    """The real module, which everyone gets from here on."""
    for each in (_SYMBOLS, _ALGEBRA):
        if isinstance(sys.modules.get(each), _StandIn):
            del sys.modules[each]
    return importlib.import_module(name)


def _ask(name: str, *asked: Any, **options: Any) -> Any:
    return getattr(_real(_SYMBOLS), name)(*asked, **options)


def _answer(name: str) -> Callable[..., Any]:
    """The answer to whether something is true: itself, if it is known."""

    def answer(asked: Any, *more: Any) -> Any:
        return asked if asked is True or asked is False else _ask(name, asked, *more)

    return answer


def _all(first: Any, *others: Any) -> Any:
    return reduce(and_, others, first)


def _any(first: Any, *others: Any) -> Any:
    return reduce(or_, others, first)


def _equal(one: Any, other: Any) -> Any:
    pair = _plain(one), _plain(other)
    return _ask("sym_eq", one, other) if None in pair else pair[0] == pair[1]


def _symbols_in(tensor: Any) -> Any:
    """The symbols in a tensor's sizes."""
    is_plain = isinstance(tensor, torch.Tensor) and _plain(tensor.shape) is not None
    return set() if is_plain else _ask("free_unbacked_symbols", tensor)


def _plain(sizes: Any) -> int | tuple[int, ...] | None:
    """One size or several, if they are numbers; else None."""
    if isinstance(sizes, (list, tuple)):
        return tuple(sizes) if all(type(size) is int for size in sizes) else None
    return sizes if type(sizes) is int else None


def _is_nested(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and size.node.is_nested_int()


class _Symbol:
    """A type that no number has."""
