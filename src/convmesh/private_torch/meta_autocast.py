"""Autocast for tensors without data.

Torch's autocast looks at tensors' devices, and does not know `meta`. Its lists also differ between devices, so a dry
run has to be told which device it stands for. Kernels like torch's own are registered here, under the key of a device
that torch no longer supports, and seen only inside `meta_autocast`: calls from within other operators are cast, and
backward casts gradients back, as with torch's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import _C as C

from convmesh.private_torch.autocast_lists import Policy, policies

KINDS = ("cpu", "cuda")
_KEY: Any = getattr(C.DispatchKey, "AutocastIPU")  # noqa: B009 - torch lists only a few of its keys
_KEYS = C.DispatchKeySet(_KEY)


class Cast(NamedTuple):
    """The autocast that is on: for which kind of device, and to which type."""

    kind: str
    dtype: torch.dtype


class _State(threading.local):
    cast: Cast | None = None


_state = _State()


def meta_cast() -> Cast | None:
    """The autocast for tensors without data, if any."""
    return _state.cast


def is_any_autocast_on() -> bool:
    """Whether autocast is on for any device."""
    return bool(C._is_any_autocast_enabled())


@contextmanager
def meta_autocast(cast: Cast | None) -> Iterator[None]:
    """Run operators on tensors without data as autocast does; None turns it off."""
    before, was_excluded = _state.cast, C._dispatch_tls_is_dispatch_key_excluded(_KEY)
    was_included = C._dispatch_tls_is_dispatch_key_included(_KEY)
    if cast is not None:
        _register()
    _state.cast = cast
    _switch(is_on=cast is not None)
    try:
        yield
    finally:
        _state.cast = before
        C._dispatch_tls_set_dispatch_key_excluded(_KEY, was_excluded)
        C._dispatch_tls_set_dispatch_key_included(_KEY, was_included)


def _switch(is_on: bool) -> None:
    """Autocast's keys are off unless a thread includes them."""
    C._dispatch_tls_set_dispatch_key_excluded(_KEY, not is_on)
    C._dispatch_tls_set_dispatch_key_included(_KEY, is_on)


@cache
def _register() -> tuple[Any, ...]:
    """Register kernels for all operators that autocast handles on any kind of device; keep the returned libraries."""
    others, known = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _KEY.name)
    for name in dict.fromkeys(name for kind in KINDS for name in policies(kind)):
        known.impl(name, _kernel(name), _KEY.name, with_keyset=True)
    return others, known


def _kernel(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    by_kind = {kind: policies(kind).get(name) for kind in KINDS}
    after = C._dispatch_keyset_full_after(_KEY)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        cast = _state.cast
        policy = None if cast is None else by_kind[cast.kind]
        if cast is None or policy is None:  # only the other kind of device casts it
            return op.redispatch(keyset & after, *args, **kwargs)
        with C._ExcludeDispatchKeyGuard(_KEYS):
            if policy == "float32 result":
                return _with_result_type(op, args, kwargs)
            dtype = _target(policy, cast.dtype, (*args, *kwargs.values()))
            return op(*_cast(args, dtype), **dict(zip(kwargs, _cast(kwargs.values(), dtype), strict=True)))

    return kernel


def _target(policy: Policy, low: torch.dtype, values: Sequence[Any]) -> torch.dtype:
    if policy == "low":
        return low
    if policy == "widest" and not any(t.dtype == torch.float32 for t in _tensors(values)):
        return low
    return torch.float32


def _cast(values: Any, dtype: torch.dtype) -> list[Any]:
    """Arguments with their tensors cast; float64 stays, as in torch."""
    return [
        value.to(dtype) if _is_cast(value) else _cast(value, dtype) if isinstance(value, (list, tuple)) else value
        for value in values
    ]


def _is_cast(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _with_result_type(op: Any, args: Any, kwargs: Any) -> Any:
    """The operator with a float32 result, unless the caller names a type."""
    if not _is_cast(args[0]):
        return op(*args, **kwargs)
    if op.overloadpacket is torch.ops.aten.norm:
        given = list(args[1:])
        p, dim, keepdim = given + [2, (), False][len(given) :]
        return torch.ops.aten.norm.ScalarOpt_dim_dtype(args[0], p, dim, keepdim, dtype=torch.float32)
    place = next(i for i, argument in enumerate(op._schema.arguments) if argument.name == "dtype")
    if kwargs.get("dtype") is None and (len(args) <= place or args[place] is None):
        return op(*args[:place], **{**kwargs, "dtype": torch.float32})
    return op(*args, **kwargs)
