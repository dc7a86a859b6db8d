"""Python's operators and protocols on sharded tensors: each is a torch function, or is refused with an alternative."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from convmesh.errors import OperatorError, UnsupportedError

Method = Callable[..., Any]


def operand_name(x: Any) -> str:
    """A tensor as errors name it: by its global shape."""
    return f"Sharded{tuple(x.shape)}"


def _operator(function: Method, swapped: bool = False) -> Method:
    """A Python operator as the torch function behind it."""

    def method(self: Any, other: Any) -> Any:
        return self.__torch_function__(function, (), (other, self) if swapped else (self, other))

    return method


def _comparison(function: Method) -> Method:
    """As in torch: comparing a tensor with `None` or a string is no error, and they are never equal."""
    compare = _operator(function)

    def method(self: Any, other: Any) -> Any:
        is_value = isinstance(other, (numbers.Number, torch.Tensor, ShardedOperators))
        return compare(self, other) if is_value else NotImplemented

    return method


def _unary(function: Method) -> Method:
    def method(self: Any) -> Any:
        return self.__torch_function__(function, (), (self,))

    return method


def _in_place(function: Method, sign: str) -> Method:
    """`x += y` changes the tensor under all its names, but not its memory, which may belong to another tensor too."""

    def method(self: Any, other: Any) -> Any:
        result = self.__torch_function__(function, (), (self, other))
        take_place(self, result, f"x {sign} y", f"x = x {sign[:-1]} y")
        return self

    return method


def take_place(x: Any, result: Any, call: str, instead: str) -> None:
    """Make `x` hold a result; refused if the shape or type does not fit `x`."""
    if result.shape != x.shape or not torch.can_cast(result.dtype, x.dtype):
        raise UnsupportedError(
            f"`{call}` would turn x from {tuple(x.shape)}, {x.dtype}, into {tuple(result.shape)}, "
            f"{result.dtype}; write `{instead}`."
        )
    x.local, x.layout = result.local.to(x.dtype), result.layout


def _refused(call: str, instead: str) -> Method:
    """A protocol that would need other ranks' values, or change a tensor behind autograd's back."""

    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise UnsupportedError(
            f"`{call}` has no split version, so it cannot run on {operand_name(self)}; use {instead}."
        )

    return method


_NUMPY = "`x.gather().numpy()`, or `x.local` for this rank's shard"

_FROM_NUMPY = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv,
    "power": operator.pow, "less": operator.lt, "less_equal": operator.le, "greater": operator.gt,
    "greater_equal": operator.ge, "equal": operator.eq, "not_equal": operator.ne,
}  # fmt: skip
"""The operators that a numpy number on the left may ask for."""


class ShardedOperators:
    """The part of a sharded tensor that Python calls."""

    __slots__ = ()

    __add__, __radd__ = _operator(torch.add), _operator(torch.add, swapped=True)
    __sub__, __rsub__ = _operator(torch.sub), _operator(torch.sub, swapped=True)
    __mul__, __rmul__ = _operator(torch.mul), _operator(torch.mul, swapped=True)
    __truediv__, __rtruediv__ = _operator(torch.div), _operator(torch.div, swapped=True)
    __floordiv__, __rfloordiv__ = _operator(torch.floor_divide), _operator(torch.floor_divide, swapped=True)
    __mod__, __rmod__ = _operator(torch.remainder), _operator(torch.remainder, swapped=True)
    __pow__, __rpow__ = _operator(torch.pow), _operator(torch.pow, swapped=True)
    __matmul__, __rmatmul__ = _operator(torch.matmul), _operator(torch.matmul, swapped=True)
    __and__, __rand__ = _operator(torch.bitwise_and), _operator(torch.bitwise_and, swapped=True)
    __or__, __ror__ = _operator(torch.bitwise_or), _operator(torch.bitwise_or, swapped=True)
    __xor__, __rxor__ = _operator(torch.bitwise_xor), _operator(torch.bitwise_xor, swapped=True)
    __lshift__, __rlshift__ = (_operator(torch.bitwise_left_shift, swapped=each) for each in (False, True))
    __rshift__, __rrshift__ = (_operator(torch.bitwise_right_shift, swapped=each) for each in (False, True))
    __lt__, __le__, __gt__, __ge__ = (_operator(f) for f in (torch.lt, torch.le, torch.gt, torch.ge))
    __eq__, __ne__ = _comparison(torch.eq), _comparison(torch.ne)
    __neg__, __abs__, __invert__ = _unary(torch.neg), _unary(torch.abs), _unary(torch.bitwise_not)
    __iadd__, __isub__ = _in_place(torch.add, "+="), _in_place(torch.sub, "-=")
    __imul__, __itruediv__ = _in_place(torch.mul, "*="), _in_place(torch.div, "/=")
    __ipow__ = _in_place(torch.pow, "**=")
    __getitem__ = _operator(operator.getitem)
    __hash__ = object.__hash__

    __delitem__ = _refused("del x[...]", "a slice, `x[...]`")
    __divmod__ = __rdivmod__ = _refused("divmod", "`x / y` and `torch.floor`")
    __round__ = __trunc__ = __floor__ = __ceil__ = _refused("round, trunc, floor or ceil", "torch.round, torch.floor")
    __array__ = _refused("numpy.asarray", _NUMPY)
    # torch.as_tensor, torch.tensor and torch.asarray ask for these before they read element by element.
    __dlpack__ = __dlpack_device__ = _refused("torch.as_tensor or from_dlpack", "`x` as it is, or `x.gather()`")
    numpy = _refused("Tensor.numpy", _NUMPY)
    tolist = _refused("Tensor.tolist", "`x.gather().tolist()`")
    __reduce_ex__ = _refused("pickle", "`x.gather()` for the whole tensor, or `x.local` with `x.layout`")

    def __setitem__(self, index: Any, value: Any) -> None:
        self.__torch_function__(operator.setitem, (), (self, index, value))  # type: ignore[attr-defined]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """A numpy number as the left operand counts as a number; numpy's arrays and functions are refused."""
        left = inputs[0]
        asked = _FROM_NUMPY.get(ufunc.__name__) if method == "__call__" and not options and len(inputs) == 2 else None
        if asked is None or not isinstance(left, numbers.Number):
            raise UnsupportedError(
                f"`numpy.{ufunc.__name__}` cannot run on {operand_name(self)}; use the torch function, with arrays as "
                "tensors (`torch.from_numpy`)."
            )
        return asked(left.item(), self)  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        """The parts of dim 0, as with torch's tensors."""
        len(self)  # raises for a tensor without dims
        return iter(self.__torch_function__(torch.unbind, (), (self,)))  # type: ignore[attr-defined]

    def __contains__(self, value: Any) -> bool:
        """Whether any element equals `value`."""
        return bool(torch.any(self.__torch_function__(torch.eq, (), (self, value))))  # type: ignore[attr-defined]

    def __len__(self) -> int:
        """The extent of dim 0. `torch.as_tensor` and `torch.tensor` end up here, at the first single element."""
        shape: tuple[int, ...] = self.shape  # type: ignore[attr-defined]
        if not shape:
            raise OperatorError.of(
                "len",
                operand_name(self),
                TypeError("a tensor without dims has no length, nor can torch.as_tensor read it"),
            )
        return shape[0]

    def item(self) -> Any:
        """The value of a tensor of one element, e.g. a loss, as a Python number."""
        return self._one("item").item()

    def __bool__(self) -> bool:
        return bool(self._one("bool"))

    def __float__(self) -> float:
        return float(self._one("float"))

    def __int__(self) -> int:
        return int(self._one("int"))

    def __index__(self) -> int:
        try:
            return operator.index(self._one("index"))
        except TypeError as error:
            raise OperatorError.of("index", operand_name(self), error) from error

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    def _one(self, name: str) -> torch.Tensor:
        """The only element, on every rank; a tensor with more is refused before anything is sent."""
        tensor: Any = self
        if tensor.numel() != 1:
            told = ValueError(f"only one element can become a Python value, not {tensor.numel()}; reduce it first")
            raise OperatorError.of(name, operand_name(self), told)
        if tensor.local.is_meta:
            raise OperatorError.of(
                name, operand_name(self), ValueError("a tensor of a dry run has no values to look at")
            )
        whole: torch.Tensor = tensor.detach().gather()
        return whole
