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

from convmesh.graph.tracing.closed import is_users
from convmesh.graph.tracing.evaluate import FACTORIES
from convmesh.graph.tracing.node_meta import VALUE
from convmesh.private_torch import tree_leaves, tree_map
from convmesh.private_torch.interception import checkpoints_inlined, function_apply, mask_questions, replaced

_QUESTIONS = (torch.is_tensor, torch.is_floating_point, torch.is_complex)
"""Of torch, with the same answer in every run."""

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
    changes = [
        (nn.Module, "training", training),
        (autograd.Function, "apply", _asking(by, function_apply())),
        (torch.jit, "isinstance", _of_values(torch.jit.isinstance)),
        *((torch, asked.__name__, _of_values(asked)) for asked in _QUESTIONS),
        *mask_questions(_value_of),
        (saved_tensors_hooks, "__enter__", lambda _: by.saved_tensor_hooks()),
        (saved_tensors_hooks, "__exit__", lambda *_: None),
        *((torch, function.__name__, _taking_proxies(function, by)) for function in FACTORIES),
    ]
    with replaced(changes), checkpoints_inlined(by.saved_tensor_hooks), _Factories(by.factory):
        yield


@contextmanager
def without_own_gradients(refuse: Callable[[], None]) -> Iterator[None]:
    """In here `refuse` is called for every custom function of the user, whose backward an export would lose."""
    apply = function_apply()

    def call(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            refuse()
        return apply(cls, *args, **kwargs)

    with replaced([(autograd.Function, "apply", classmethod(call))]):
        yield


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
    """`torch.jit.isinstance`, or another question, as it answers for the values that proxies stand for."""

    def call(obj: Any, *target_type: Any) -> bool:
        return is_instance(tree_map(_value_of, obj), *target_type)

    return call


def _value_of(leaf: Any) -> Any:
    return leaf.node.meta[VALUE] if isinstance(leaf, fx.Proxy) else leaf


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
