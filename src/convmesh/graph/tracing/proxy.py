"""Stand-ins for values during a trace: they record calls and know their shapes."""

from __future__ import annotations

import linecache
import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx, nn

from convmesh.graph.tracing.closed import DataDependentError, is_users
from convmesh.graph.tracing.node_meta import VALUE

if TYPE_CHECKING:
    from convmesh.graph.tracing.tracer import LayerTracer


_ALWAYS_THE_SAME = frozenset({"ndim", "dim", "is_floating_point", "is_complex"})
"""What a tensor answers alike in every run."""


class ValueProxy(fx.Proxy):
    """A proxy that gives Python its concrete value where one is needed, unless that depends on data."""

    tracer: LayerTracer

    @property
    def value(self) -> Any:
        return self.node.meta[VALUE]

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Makes `isinstance(x, torch.Tensor)` in a model true, as it is for a tensor.

        Torch's C++ asks the same question before it reads a tensor's memory, and must get the true answer.
        """
        if not _asked_by_user():
            return ValueProxy
        value = self.value
        if isinstance(value, torch.Tensor):
            return nn.Parameter if isinstance(value, nn.Parameter) else torch.Tensor
        return type(value)

    def __getattr__(self, name: str) -> Any:
        value = self.value
        if name in _ALWAYS_THE_SAME and isinstance(value, torch.Tensor):
            return getattr(value, name)
        attribute = getattr(value, name)  # an AttributeError if the value would raise one
        if callable(attribute):
            return _Method(self, name)
        return self.tracer.create_proxy("call_function", getattr, (self, name), {})

    def concrete(self) -> Any:
        """The value for Python: fixed in the graph, which checks it in every run."""
        if isinstance(self.value, torch.Tensor):
            raise DataDependentError("Python needs the value of a tensor, which is not known before the model runs")
        self.tracer.bake(self)
        return self.value

    def __bool__(self) -> bool:
        value = self.value
        if isinstance(value, torch.Tensor):
            raise DataDependentError("it branches on the value of a tensor, which is not known before the model runs")
        return bool(self.concrete())

    def __int__(self) -> int:
        return int(self.concrete())

    def __float__(self) -> float:
        return float(self.concrete())

    def __index__(self) -> int:
        return operator.index(self.concrete())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.concrete(), digits)

    def __floor__(self) -> int:
        whole: int = math.floor(self.concrete())
        return whole

    def __ceil__(self) -> int:
        whole: int = math.ceil(self.concrete())
        return whole

    def __trunc__(self) -> int:
        whole: int = math.trunc(self.concrete())
        return whole

    def __len__(self) -> int:
        if isinstance(self.value, torch.Tensor) and self.value.dim():
            return int(self.shape[0])
        return len(self.value)  # for a tensor without dims, torch's own error

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.value, dict):
            return iter(self.value)
        return iter([self[index] for index in range(len(self))])

    def __contains__(self, item: object) -> bool:
        return item in self.concrete()

    def __hash__(self) -> int:
        return id(self)

    def __str__(self) -> str:
        return repr(self) if isinstance(self.value, torch.Tensor) else str(self.value)

    def __format__(self, spec: str) -> str:
        return str(self) if isinstance(self.value, torch.Tensor) else format(self.value, spec)

    def keys(self) -> Any:
        return self.value.keys()

    def items(self) -> list[tuple[Any, Any]]:
        return [(key, self[key]) for key in self.value]

    def values(self) -> list[Any]:
        return [self[key] for key in self.value]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __getitem__(self, index: Any) -> ValueProxy:
        return self._call(operator.getitem, index)

    def _call(self, function: Callable[..., Any], *args: Any) -> ValueProxy:
        return cast("ValueProxy", self.tracer.create_proxy("call_function", function, (self, *args), {}))


def _in_place(name: str) -> Callable[[ValueProxy, Any], ValueProxy]:
    """`x += y` changes a tensor in place, but makes a new number or tuple."""
    on_tensors, on_values = getattr(operator, f"i{name}"), getattr(operator, name)

    def method(self: ValueProxy, other: Any) -> ValueProxy:
        return self._call(on_tensors if isinstance(self.value, torch.Tensor) else on_values, other)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "matmul"):
    setattr(ValueProxy, f"__i{_name}__", _in_place(_name))


class _Method:
    """A method of a value, recorded when called."""

    def __init__(self, owner: ValueProxy, name: str) -> None:
        self._owner = owner
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner.tracer.create_proxy("call_method", self._name, (self._owner, *args), kwargs)


def _asked_by_user() -> bool:
    """Whether a line of the user's code says `isinstance`, or `x.__class__`, as opt_einsum does."""
    frame = sys._getframe(2)
    asking = [name for name in ("isinstance", "__class__") if name in frame.f_code.co_names]
    if not asking or not is_users(frame.f_code.co_filename):
        return False
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return any(name in line for name in asking)
