"""What torch does differently during a trace, and which modes a forward must not change."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import autograd, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from convmesh.graph.tracing.closed import is_users
from convmesh.graph.tracing.evaluate import FACTORIES
from convmesh.graph.tracing.node_meta import VALUE
from convmesh.private_torch import tree_leaves, tree_map
from convmesh.private_torch.interception import checkpoint_generators, function_apply

RecordFactory = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]


class Ambient:
    """Gradient mode and autocast at the start of a trace: a graph does not record when they change."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._autocast = _autocast()

    def changed(self) -> str | None:
        """The change that a graph would lose, or None."""
        if torch.is_grad_enabled() and not self._grad:
            return "it switches gradients on"
        if _autocast() != self._autocast:
            return "it switches autocast on or off"
        return None

    def without_grad(self) -> bool:
        """Whether the forward has switched gradients off."""
        return self._grad and not torch.is_grad_enabled()


def _autocast() -> tuple[bool, bool]:
    return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


class _Factories(TorchFunctionMode):
    def __init__(self, record: RecordFactory) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func in FACTORIES:
            return self._record(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Intercepts(Protocol):
    """Answers, during a trace, calls that torch would otherwise make unseen."""

    def factory(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...
    def training_of(self, module: nn.Module) -> Any: ...
    def saved_tensor_hooks(self) -> None: ...
    def autograd_function(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...


@contextmanager
def intercepted(by: Intercepts) -> Iterator[None]:
    """Let `by` answer for tensor factories, `module.training` and custom functions; checkpoints are inlined."""
    training = property(by.training_of, lambda module, mode: module.__dict__.__setitem__("training", mode))
    inlined = _InlinedCheckpoints(by)
    replaced: list[tuple[Any, str, Any]] = [
        (nn.Module, "training", training),
        (autograd.Function, "apply", _asking(by, function_apply())),
        (checkpoint, "CheckpointFunction", inlined),
        *((checkpoint, name, inlined.around) for name in checkpoint_generators()),
        (torch.jit, "isinstance", _of_values(torch.jit.isinstance)),
        (torch, "is_tensor", _of_values(torch.is_tensor)),
        (saved_tensors_hooks, "__enter__", lambda _: by.saved_tensor_hooks()),
        (saved_tensors_hooks, "__exit__", lambda *_: None),
        *((torch, function.__name__, _taking_proxies(function, by)) for function in FACTORIES),
    ]
    kept = [(owner, name, vars(owner).get(name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        with _Factories(by.factory):
            yield
    finally:
        for owner, name, value in kept:
            delattr(owner, name) if value is None else setattr(owner, name, value)


def _asking(by: Intercepts, apply: Callable[..., Any]) -> object:
    """`Function.apply`, unless `by` refuses it because its backward would be lost."""

    def call(cls: type, *args: Any, **kwargs: Any) -> Any:
        return by.autograd_function(partial(apply, cls), args, kwargs)

    return classmethod(call)


def _taking_proxies(function: Callable[..., Any], by: Intercepts) -> Callable[..., Any]:
    """A factory that takes proxies: torch's parser refuses `torch.randn(x.shape[0], 1)` before any mode sees it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        traced = any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs)))
        return by.factory(function, args, kwargs) if traced else function(*args, **kwargs)

    return call


def _of_values(is_instance: Callable[..., bool]) -> Callable[..., bool]:
    """`torch.jit.isinstance` or `torch.is_tensor`, answering for the values that proxies stand for."""

    def call(obj: Any, *target_type: Any) -> bool:
        values = tree_map(lambda leaf: leaf.node.meta[VALUE] if isinstance(leaf, fx.Proxy) else leaf, obj)
        return is_instance(values, *target_type)

    return call


class _InlinedCheckpoints:
    """Makes both forms of torch.utils.checkpoint run the function directly during a trace."""

    def __init__(self, by: Intercepts) -> None:
        self._by = by

    def apply(self, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Replaces its autograd function (reentrant)."""
        del preserve_rng_state
        self._by.saved_tensor_hooks()
        return function(*args)

    def around(self, *settings: Any, **named: Any) -> Iterator[None]:
        """Replaces the generator that it resumes before and after the function (not reentrant)."""
        del settings, named
        self._by.saved_tensor_hooks()
        yield


def this_line() -> str:
    """The line of the user's code that is running: `net.py:12: if x.shape[2] > 4:`."""
    file, line = this_place()
    return f"{Path(file).name}:{line}: {linecache.getline(file, line).strip()}"


def this_place() -> tuple[str, int]:
    """File and line of the user's code that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
