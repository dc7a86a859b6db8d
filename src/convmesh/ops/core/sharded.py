"""One rank's shard of a global tensor: what split operators take and return."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, overload

import torch

from convmesh.dist import OpenMesh, exchange
from convmesh.errors import ConvMeshError, LayoutError, OperatorError, UnsupportedError
from convmesh.layout import Box, Layout
from convmesh.layout.layout import FoldedLayout
from convmesh.ops.core.by_samples import run_by_samples
from convmesh.ops.core.exchange_plans import conversion, replicated_layout
from convmesh.ops.core.operators import ShardedOperators, operand_name
from convmesh.ops.core.registry import handler_of, name_of, takes_cut_weights, takes_folded, tensor_method
from convmesh.private_torch import tree_map
from convmesh.private_torch.dtensors import is_dtensor

CutOf = Mapping[int, str | Sequence[str]]


class MissingMethodError(UnsupportedError, AttributeError):
    """A tensor method without a split version; an AttributeError too, so that `hasattr` works."""


class Sharded(ShardedOperators):
    """The local shard, the global layout and the mesh. Torch functions on it run their split versions.

    `layout` describes the global tensor; `shape`, `dim()` and `size()` are the global ones.
    """

    __slots__ = ("layout", "local", "mesh")
    local: torch.Tensor
    layout: Layout
    mesh: OpenMesh

    def __init__(self, local: torch.Tensor, layout: Layout, mesh: OpenMesh) -> None:
        # Bypasses `__setattr__`, which is slower: every call makes one of these.
        _set_local(self, local)
        _set_layout(self, layout)
        _set_mesh(self, mesh if layout.mesh is mesh.mesh else mesh.cut_as(layout.mesh))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the split version of `func`. Anything that goes wrong in it is raised as one of our errors."""
        del types  # torch leaves DTensors out of it
        local = run_by_samples(func, args, kwargs)
        if local is not None:
            return local
        has_folded = _check_operands(func, (*args, *kwargs.values()) if kwargs else args)
        handler = handler_of(func)
        if has_folded and not takes_folded(func):
            args, kwargs = _in_one_piece((args, kwargs))
        if kwargs and kwargs.get("out") is not None:
            raise UnsupportedError(f"`{name_of(func)}`: `out=` has no split version; use the result, `x = f(...)`.")
        try:
            return handler(*args, **(kwargs or {}))
        except Exception as error:
            if _says_enough(error):
                raise
            raise OperatorError.of(name_of(func), _named(args), error) from error

    def __getattr__(self, name: str) -> Any:
        method = tensor_method(name)
        if method is None:
            raise MissingMethodError(
                f"`Sharded.{name}`: this tensor method has no split version; see `ops.supported()`{_instead(name)}."
            )
        return partial(_call_method, method, self)

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            object.__setattr__(self, name, value)
        except AttributeError:
            raise MissingMethodError(
                f"`Sharded.{name} = ...`: this attribute cannot be set; only `local`, `layout` and `requires_grad` can."
            ) from None

    def __repr__(self) -> str:
        return f"Sharded(shape={self.shape}, local={tuple(self.local.shape)}, {self.layout.mesh}, dtype={self.dtype})"

    @property
    def shape(self) -> torch.Size:
        shape = self.layout.shape[:-1] if self.layout.copies else self.layout.shape
        return torch.Size((*shape[:-2], shape[-2] * shape[-1]) if self.layout.folds else shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def device_kind(self) -> str:
        """`cpu`, `cuda`, …: where the shard is, or would be if it had data."""
        return self.mesh.device_kind(self.local)

    @property
    def requires_grad(self) -> bool:
        return self.local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, value: bool = True) -> Sharded:
        """Ask for gradients, which `x.local.grad` then holds. Call it on every rank, for backward is collective."""
        try:
            self.local.requires_grad_(value)
        except RuntimeError as error:
            raise OperatorError.of("Tensor.requires_grad_", operand_name(self), error) from error
        return self

    @property
    def mT(self) -> Any:  # noqa: N802 - torch's name
        return self.__torch_function__(torch.transpose, (), (self, -2, -1))

    @property
    def T(self) -> Any:  # noqa: N802
        return self.__torch_function__(torch.permute, (), (self, tuple(reversed(range(self.ndim)))))

    @property
    def real(self) -> Any:
        return self.__torch_function__(torch.real, (), (self,))

    @property
    def imag(self) -> Any:
        return self.__torch_function__(torch.imag, (), (self,))

    @property
    def is_nested(self) -> bool:
        return False

    @property
    def is_cuda(self) -> bool:
        return self.local.is_cuda

    @property
    def ndim(self) -> int:
        return len(self.layout.cuts) - self.layout.folds - self.layout.copies

    @property
    def unfolded(self) -> Sharded:
        """The tensor with the blocks of its last dim in a separate dim, if its layout has blocks."""
        if not isinstance(self.layout, FoldedLayout):
            return self
        return Sharded(self.local, self.layout.unfolded, self.mesh)

    def in_one_piece(self) -> Sharded:
        """The tensor with its last dim in one piece, by the rule of reshapes: blocks that are cut are gathered."""
        folds = self.layout.folds
        return self.__torch_function__(torch.reshape, (), (self.unfolded, tuple(self.shape))) if folds else self

    @property
    def box(self) -> Box:
        """The global indices that this rank holds."""
        return self.layout.box(self.mesh.rank)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        try:
            return self.shape if dim is None else self.shape[dim]
        except (IndexError, TypeError) as error:
            raise OperatorError.of("Tensor.size", operand_name(self), error) from error

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return self.local.is_floating_point()

    def is_complex(self) -> bool:
        return self.local.is_complex()

    def backward(self, gradient: torch.Tensor | Sharded | None = None, **options: Any) -> None:
        """Backpropagate from a tensor that every rank holds whole (a loss), or with this rank's gradient shard."""
        try:
            self.local.backward(gradient.local if isinstance(gradient, Sharded) else gradient, **options)
        except Exception as error:
            if _says_enough(error):
                raise
            raise OperatorError.of("backward", operand_name(self), error) from error

    def detach(self) -> Sharded:
        return self.like(self.local.detach())

    def like(self, local: torch.Tensor) -> Sharded:
        """Another tensor of the same layout."""
        return Sharded(local, self.layout, self.mesh)

    def __copy__(self) -> Sharded:
        return self.like(self.local)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        """On the same mesh; as in torch, only for autograd's leaves."""
        try:
            return self.like(copy.deepcopy(self.local, memo))
        except RuntimeError as error:
            raise OperatorError.of("copy.deepcopy", operand_name(self), error) from error

    def redistribute(self, target: Layout | CutOf) -> Sharded:
        """The same tensor in another layout, or cut as `x.redistribute({0: "data"})` says; differentiable."""
        if self.layout.folds:
            return self.in_one_piece().redistribute(target)
        if not isinstance(target, Layout):
            target = Layout.of(self.mesh.mesh, self.layout.shape, target)
        if target == self.layout:
            return self
        if (target.mesh, target.shape) != (self.layout.mesh, self.layout.shape):
            raise LayoutError(f"`target` (={target}) must lay out {self.layout.shape} on {self.layout.mesh}.")
        plan = conversion(self.layout, target, self.mesh.rank)
        return Sharded(exchange(self.local, plan, self.mesh), target, self.mesh)

    def with_whole(self, dims: Sequence[int]) -> Sharded:
        """The same tensor with `dims` no longer cut: their axes replicate it."""
        x = self.in_one_piece()
        return x.redistribute(x.layout.with_whole(dims)) if x.layout.axes_of(dims) else x

    @overload
    def gather(self) -> torch.Tensor: ...

    @overload
    def gather(self, dim: int, index: torch.Tensor | Sharded) -> Sharded: ...

    def gather(self, *args: Any, **kwargs: Any) -> Any:
        """The whole global tensor, on every rank; differentiable. With a dim and indices, `torch.gather`."""
        if args or kwargs:
            return self.__torch_function__(torch.gather, (), (self, *args), kwargs)
        return self.redistribute(Layout.of(self.mesh.mesh, self.shape)).local


_set_local, _set_layout, _set_mesh = (Sharded.__dict__[name].__set__ for name in ("local", "layout", "mesh"))

_DTENSOR = (
    "a DTensor cannot take part in a split operator: torch's convolution on spatially sharded DTensors returns wrong "
    "numbers without an error. Pass `x.to_local()` through `from_local(local, layout, mesh)`, or `x.full_tensor()` "
    "through `shard(x, mesh, cut)`."
)


def _refuse_dtensor(value: object) -> None:
    if is_dtensor(value):
        raise UnsupportedError(_DTENSOR)


_READ_BY_TORCH = frozenset(
    "all amax amin any argmax argmin count_nonzero log_softmax logsumexp max mean min prod softmax std sum var".split()  # noqa: SIM905
)
"""Methods whose arguments torch itself parses, as those of the function of the same name: it knows their forms."""


def _says_enough(error: Exception) -> bool:
    """Whether an error is not about the call: ours, memory, lost ranks, or torch's own signals, which it must see.

    Those have their own types; a wrong call raises one of Python's.
    """
    return type(error).__module__ != "builtins" or isinstance(error, (Warning, MemoryError, OSError))


def _call_method(method: Callable[..., Any], x: Sharded, *args: Any, **kwargs: Any) -> Any:
    name = method.__name__
    if name not in _READ_BY_TORCH:
        return Sharded.__torch_function__(method, (), (x, *args), kwargs)
    local = run_by_samples(method, (x, *args), kwargs)
    if local is not None:
        return local
    try:
        return getattr(torch, name)(x, *args, **kwargs)
    except TypeError as error:
        if isinstance(error, ConvMeshError):
            raise
        raise OperatorError.of(name_of(method), operand_name(x), error) from error


def _instead(name: str) -> str:
    """The method to use in place of one that changes its tensor."""
    plain = name.removesuffix("_")
    return f"; use `x = x.{plain}(...)`" if plain != name and tensor_method(plain) is not None else ""


def _check_operands(function: Callable[..., Any], arguments: Iterable[Any]) -> bool:
    """Refuse DTensors where no weight is expected, and tensors of two meshes; return whether any tensor is folded."""
    takes_dtensors, first, has_folded = takes_cut_weights(function), None, False
    for argument in arguments:
        for value in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(value, Sharded):
                first = first or value.mesh
                has_folded |= value.layout.folds
                _refuse_other_mesh(function, first, value.mesh)
            elif not takes_dtensors:
                _refuse_dtensor(value)
    return has_folded


def _in_one_piece(arguments: Any) -> Any:
    return tree_map(lambda x: x.in_one_piece() if isinstance(x, Sharded) else x, arguments)


def _refuse_other_mesh(function: Callable[..., Any], first: OpenMesh, other: OpenMesh) -> None:
    if other is first or (other.mesh == first.mesh and [*other.world_ranks] == [*first.world_ranks]):
        return
    raise LayoutError(
        f"`{name_of(function)}`: one operand lives on {first.mesh}, another on {other.mesh} (world ranks "
        f"{[*first.world_ranks][:8]} and {[*other.world_ranks][:8]}); bring them to one mesh: "
        "`shard(x.gather(), mesh, cut)`."
    )


def _named(args: Iterable[Any]) -> str:
    """The sharded operands of a call."""
    values = [v for arg in args for v in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return ", ".join(operand_name(v) for v in values if isinstance(v, Sharded)) or "a Sharded tensor"


def shard(tensor: torch.Tensor, mesh: OpenMesh, cut: CutOf | Layout) -> Sharded:
    """This rank's shard of a global tensor that every rank has: `shard(x, mesh, {0: "data", 2: "depth"})`."""
    _refuse_dtensor(tensor)
    layout = cut if isinstance(cut, Layout) else Layout.of(mesh.mesh, tensor.shape, cut)
    if layout.shape != tuple(tensor.shape):
        raise LayoutError(f"`cut` lays out a tensor of shape {layout.shape}, but `tensor` has {tuple(tensor.shape)}.")
    if problem := _wrong_mesh(layout, mesh):
        raise LayoutError(f"`cut`: {problem}.")
    mesh.agree_once("`shard`", _identity(layout, tensor))
    if tensor.requires_grad:
        return replicated(tensor, mesh).redistribute(layout)
    # A plain slice, cloned: it does not keep the whole tensor's memory alive.
    return Sharded(tensor[layout.box(mesh.rank).slices()].clone(), layout, mesh)


def from_local(local: torch.Tensor, layout: Layout, mesh: OpenMesh) -> Sharded:
    """A shard that this rank already has, e.g. from a file. Checked on all ranks together, so that none hangs."""
    _refuse_dtensor(local)
    problem, expected = _wrong_mesh(layout, mesh), layout.box(mesh.rank).shape
    if not problem and tuple(local.shape) != expected:
        problem = f"`local` has shape {tuple(local.shape)}, but {layout} gives this rank {expected}"
    mesh.agree("`from_local`", _identity(layout, local), problem)
    return Sharded(local, layout, mesh)


def _wrong_mesh(layout: Layout, mesh: OpenMesh) -> str | None:
    return None if layout.mesh == mesh.mesh else f"the layout is for {layout.mesh}, but the open mesh is {mesh.mesh}"


def _identity(layout: Layout, tensor: torch.Tensor) -> str:
    """What ranks must agree on about a tensor, or a later exchange, such as backward's, would hang."""
    learns = " with gradient" if tensor.requires_grad else ""
    return f"{layout} cut at {[cut.partition.bounds for cut in layout.cuts]}, {tensor.dtype}{learns}"


def replicated(tensor: torch.Tensor, mesh: OpenMesh) -> Sharded:
    """A tensor that every rank holds whole, such as a weight."""
    _refuse_dtensor(tensor)
    return Sharded(tensor, replicated_layout(mesh.mesh, tuple(tensor.shape)), mesh)


def on_mesh(value: Sharded | torch.Tensor, mesh: OpenMesh) -> Sharded:
    """An operand as a shard: plain tensors count as replicated."""
    return value if isinstance(value, Sharded) else replicated(value, mesh)
