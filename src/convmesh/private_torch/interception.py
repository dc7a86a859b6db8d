"""Places in torch that are replaced while a model is traced, because torch offers no hook there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import autograd
from torch.fx import _symbolic_trace
from torch.utils import checkpoint


def function_apply() -> Callable[..., Any]:
    """`autograd.Function.apply` with its class as first argument.

    Tracing must see custom functions, whose backward a graph would lose. Up to 2.13 `apply` is a classmethod, from 2.15
    on a descriptor written in C: binding works for both.
    """
    descriptor = vars(autograd.Function)["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return descriptor.__get__(None, cls)(*args, **kwargs)

    return apply


@contextmanager
def without_wrapped_functions() -> Iterator[None]:
    """In here functions marked with `torch.fx.wrap` are traced into, like any other.

    Torch makes them single nodes because its proxies have no shapes to branch on; ours do.
    """
    tables: tuple[Any, ...] = (_symbolic_trace._wrapped_fns_to_patch, _symbolic_trace._wrapped_methods_to_patch)
    kept = [table.copy() for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, content in zip(tables, kept, strict=True):
            table.update(content) if isinstance(table, dict) else table.extend(content)


def checkpoint_generators() -> tuple[str, ...]:
    """Names in torch.utils.checkpoint of what its non-reentrant form resumes before and after the function.

    Tracing inlines checkpointed calls. From 2.15 on `checkpoint` calls the one that ends in `_impl`.
    """
    names = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
    return tuple(name for name in names if hasattr(checkpoint, name))
