"""Places in torch that are replaced while a model is traced, because torch offers no hook there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import autograd
from torch.fx import _symbolic_trace
from torch.nn import functional
from torch.nn.modules import transformer
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


def mask_questions(value_of: Callable[[Any], Any]) -> tuple[tuple[Any, str, Callable[..., Any]], ...]:
    """What torch's transformers ask about masks, as owner, name and answer; `value_of` tells what a stand-in is for.

    The one asks for `torch.Tensor`, which a stand-in is not. The other looks at all values for a causal mask, only to
    take a faster kernel: a mask that stands in for one is added as it is.
    """
    type_of, is_causal_mask = functional._none_or_dtype, transformer._detect_is_causal_mask

    def dtype(mask: Any) -> Any:
        return type_of(value_of(mask))

    def is_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        known = mask is value_of(mask) or is_causal is not None
        return bool(is_causal_mask(mask, is_causal, size)) if known else False

    return (functional, "_none_or_dtype", dtype), (transformer, "_detect_is_causal_mask", is_causal)


@contextmanager
def replaced(attributes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes of torch with other values, as (owner, name, value)."""
    kept = [(owner, name, vars(owner).get(name)) for owner, name, _ in attributes]
    for owner, name, value in attributes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in kept:
            delattr(owner, name) if value is None else setattr(owner, name, value)


@contextmanager
def checkpoints_inlined(tell: Callable[[], None]) -> Iterator[None]:
    """In here torch.utils.checkpoint runs functions as they are and recomputes nothing; `tell` hears of each."""
    inlined = _InlinedCheckpoints(tell)
    names = checkpoint_generators()
    with replaced([(checkpoint, "CheckpointFunction", inlined), *((checkpoint, n, inlined.around) for n in names)]):
        yield


class _InlinedCheckpoints:
    """Makes both forms of torch.utils.checkpoint run the function directly."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def apply(self, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Replaces its autograd function (reentrant)."""
        del preserve_rng_state
        self._tell()
        return function(*args)

    def around(self, *settings: Any, **named: Any) -> Iterator[None]:
        """Replaces the generator that it resumes before and after the function (not reentrant)."""
        del settings, named
        self._tell()
        yield


def checkpoint_generators() -> tuple[str, ...]:
    """Names in torch.utils.checkpoint of what its non-reentrant form resumes before and after the function.

    Tracing inlines checkpointed calls. From 2.15 on `checkpoint` calls the one that ends in `_impl`.
    """
    names = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
    return tuple(name for name in names if hasattr(checkpoint, name))
