"""The output of a call on tensors without data: shapes and types, with no memory and no random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from convmesh.graph.tracing.closed import ClosedError
from convmesh.graph.tracing.recurrent_shapes import RECURRENCES, SETTINGS_LAST, after_all_steps
from convmesh.graph.tracing.shape_shortcuts import made
from convmesh.graph.unchanged_module import unchanged
from convmesh.private_torch import tree_leaves
from convmesh.private_torch.dispatching import UncompiledDispatchMode
from convmesh.private_torch.module_tables import (
    buffers_of,
    children_of,
    give_tables,
    has_forward_hooks,
    parameters_of,
)
from convmesh.private_torch.shape_functions import leave_out_the_compiler

META = torch.device("meta")

FACTORIES: frozenset[Callable[..., Any]] = frozenset(
    {
        *(torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.logspace, torch.ones, torch.zeros),
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.tensor, torch.as_tensor),
        *(torch.tril_indices, torch.triu_indices, torch.hann_window, torch.hamming_window),
    }
)
"""Functions that make a tensor from none."""

_MOVES = frozenset({torch.Tensor.cuda, torch.Tensor.cpu})
_HOME_ATTRIBUTES = frozenset({"device", "is_cuda", "is_cpu", "is_meta"})


class OnMeta(TorchFunctionMode):
    """Puts every tensor that is made or moved on the meta device, no matter which device the call names."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if func in _MOVES:
            return args[0]
        if func is torch.Tensor.to:
            args = [META if _names_device(arg) else arg for arg in args]
        if kwargs.get("device") is not None or func in FACTORIES:
            kwargs["device"] = META
        if func in RECURRENCES and isinstance(args[0], torch.Tensor) and not kwargs and len(args) == SETTINGS_LAST:
            return after_all_steps(func, args)
        return func(*args, **kwargs)


class _Shortcuts(UncompiledDispatchMode):
    """Finds results of the most common operators without torch's own shape functions, which take far longer."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) if types else made(func, args, kwargs or {})


def _names_device(value: object) -> bool:
    return isinstance(value, (torch.device, str)) or (isinstance(value, int) and not isinstance(value, bool))


class Evaluator:
    """Runs calls on meta tensors instead of a model's own tensors, which stay untouched."""

    def __init__(self, model: nn.Module, home: torch.device) -> None:
        self.home = home
        """The device that the model is told it is on."""
        leave_out_the_compiler()
        self._model = model
        self._without_data: dict[int, torch.Tensor] = {}
        self._known: dict[Any, tuple[torch.Size, torch.dtype]] = {}

    def call(self, op: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The value of one node, given the values of its arguments."""
        with OnMeta(), _Shortcuts():
            if op == "call_module":
                return self._module(self._model.get_submodule(target), args, kwargs)
            if op == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            if target is getattr and isinstance(args[0], torch.Tensor) and args[1] in _HOME_ATTRIBUTES:
                return self._home_attribute(args[1])
            return target(*args, **kwargs)

    def _module(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A module's output. Deep networks repeat their layers, so outputs of simple modules are cached."""
        key = _identity(module, args) if not kwargs else None
        if key is not None and key in self._known:
            shape, dtype = self._known[key]
            return torch.empty(shape, dtype=dtype, device=META)
        with self._swapped(module):
            output = module(*args, **kwargs)
        if key is not None and isinstance(output, torch.Tensor):
            self._known[key] = output.shape, output.dtype
        return output

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The meta tensor that stands for one of the model's tensors; the same at every call."""
        if tensor.device.type == "meta":
            return tensor
        if id(tensor) not in self._without_data:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=META)
            learns = tensor.requires_grad and tensor.is_leaf
            is_parameter = isinstance(tensor, nn.Parameter)
            self._without_data[id(tensor)] = nn.Parameter(empty, learns) if is_parameter else empty
        return self._without_data[id(tensor)]

    def _home_attribute(self, name: str) -> object:
        return self.home if name == "device" else name == f"is_{self.home.type}"

    @contextmanager
    def _swapped(self, module: nn.Module) -> Iterator[None]:
        """Run the module on tensors without data in here."""
        with unchanged(module):
            for part in module.modules():
                give_tables(part, self._stand_ins(parameters_of(part)), self._stand_ins(buffers_of(part)))
            yield

    def _stand_ins(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tensor if tensor is None else self.tensor(tensor) for name, tensor in tensors.items()}


def _identity(module: nn.Module, args: Sequence[Any]) -> object:
    """All that determines a torch.nn module's output shape; None if that is more than its settings."""
    is_simple = not children_of(module) and not has_forward_hooks(module)
    if not is_simple or not type(module).__module__.startswith("torch.nn.modules"):
        return None
    if len(args) != 1 or not isinstance(args[0], torch.Tensor):
        return None
    weights = ((name, w.shape, w.dtype) for name, w in parameters_of(module).items() if w is not None)
    settings = type(module), module.extra_repr(), module.training
    return *settings, *weights, args[0].shape, args[0].dtype


def needs_data(error: Exception) -> bool:
    """Whether a call failed only because its tensors have no data."""
    return isinstance(error, (NotImplementedError, ClosedError)) or "meta" in str(error).lower()


def failure(error: Exception, args: Any, kwargs: Any) -> str:
    """The error, and the shapes that the call was given."""
    shapes = [tuple(leaf.shape) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    given = ", ".join(map(str, shapes)) or "no tensor"
    return f"{type(error).__name__}: {error} (it was given {given})"
