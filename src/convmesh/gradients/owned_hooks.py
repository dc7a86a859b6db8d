"""Hooks that do not keep their owner alive, and disappear with it.

A parameter owns its hooks, and a reducer holds its parameters, partly through autograd's C++ nodes, where Python's
garbage collector cannot follow. A hook that held the reducer would close that cycle, and neither would ever be freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weak_hook(method: Callable[..., Any], *parts: Any) -> Callable[..., Any]:
    """A hook that calls `method(*parts, *arguments)`, and holds neither the method's object nor the parts."""
    owner, call = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]
    held = [weakref.ref(part) for part in parts]

    def hook(*arguments: Any) -> Any:  # runs for every parameter in every step
        alive = owner()
        return None if alive is None else call(alive, *[part() for part in held], *arguments)

    return hook


class OwnedHooks:
    """The handles of an owner's hooks: `close` removes them, or the end of the owner."""

    def __init__(self, owner: object) -> None:
        self._handles: list[Any] = []
        self._remove = weakref.finalize(owner, _remove_all, self._handles)
        self._remove.atexit = False

    @property
    def are_open(self) -> bool:
        return self._remove.alive

    def add(self, *handles: Any) -> None:
        self._handles += handles

    def close(self) -> None:
        """Remove the hooks; a second call does nothing."""
        self._remove()


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
