"""torch's shape functions in Python, without the compiler.

Most operators on tensors without data run one of these, and each is guarded against being compiled itself. The guard
imports torch's compiler, which takes as long as a small plan, and then runs longer than the function. Nothing is
compiled while shapes are computed, so the guards are bypassed, unless the compiler is already loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch._refs.nn.functional
from torch._compile import _disable_dynamo
from torch._decomp import decomposition_table

_ANSWER = "__dynamo_disable"
"""The attribute in which a guard keeps the function that it calls in place of the guarded one."""

_GUARD = _disable_dynamo(lambda: None).__code__


@cache
def leave_out_the_compiler() -> int:
    """Let shape functions run without their guards; returns how many."""
    if "torch._dynamo" in sys.modules:
        return 0
    guarded = {id(function): function for function in _guarded()}
    for function in guarded.values():
        setattr(function, _ANSWER, function)
    return len(guarded)


def _guarded() -> Iterator[Any]:
    """Every function behind a guard, however many wrappers are around it."""
    rooms = (torch._refs, torch._refs.nn.functional)
    for function in (*decomposition_table.values(), *(value for room in rooms for value in vars(room).values())):
        wrapper = function
        while (wrapped := _wrapped(wrapper)) is not None:
            if wrapper.__code__ is _GUARD:
                yield wrapped
            wrapper = wrapped


def _wrapped(function: Any) -> Any:
    """What a wrapper calls: torch's wrappers all name it the same, but their `__wrapped__` shows only the innermost."""
    free = getattr(getattr(function, "__code__", None), "co_freevars", ())
    called = next((name for name in ("fn", "f") if name in free), None)
    return None if called is None else function.__closure__[free.index(called)].cell_contents
