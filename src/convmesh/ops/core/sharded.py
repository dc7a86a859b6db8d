"""One rank's shard of a global tensor: what split operators take and give."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from convmesh.dist import OpenMesh, exchange
from convmesh.errors import LayoutError, UnsupportedError
from convmesh.layout import Box, Layout
from convmesh.ops.core.exchange_plans import conversion, replicated_layout
from convmesh.ops.core.registry import handler_of, takes_cut_weights, tensor_method

CutOf = Mapping[int, str | Sequence[str]]


class MissingMethodError(UnsupportedError, AttributeError):
    """A tensor method without a split version; an AttributeError too, so that `hasattr` works."""


def _operator(function: Callable[..., Any], swapped: bool = False) -> Callable[[Any, Any], Any]:
    """A Python operator as the torch function behind it."""

    def method(self: Sharded, other: Any) -> Any:
        return handler_of(function)(*((other, self) if swapped else (self, other)))

    return method


class Sharded:
    """The local shard, the global layout and the mesh. Torch functions on it run their split versions.

    `layout` describes the global tensor; `shape`, `dim()` and `size()` are the global ones.
    """

    __slots__ = ("layout", "local", "mesh")

    def __init__(self, local: torch.Tensor, layout: Layout, mesh: OpenMesh) -> None:
        self.local = local
        self.layout = layout
        self.mesh = mesh

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        del types  # torch leaves DTensors out of it
        if not takes_cut_weights(func):
            for argument in (*args, *kwargs.values()) if kwargs else args:
                if not isinstance(argument, Sharded):
                    for value in argument if isinstance(argument, (list, tuple)) else (argument,):
                        _refuse_dtensor(value)
        return handler_of(func)(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        method = tensor_method(name)
        if method is None:
            raise MissingMethodError(
                f"`Sharded.{name}`: this tensor method has no split version; see `ops.supported()`."
            )
        return partial(method, self)

    def __repr__(self) -> str:
        return f"Sharded(shape={self.shape}, local={tuple(self.local.shape)}, {self.layout.mesh}, dtype={self.dtype})"

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.layout.shape)

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

    @property
    def is_cuda(self) -> bool:
        return self.local.is_cuda

    @property
    def ndim(self) -> int:
        return len(self.layout.cuts)

    @property
    def box(self) -> Box:
        """The global indices that this rank holds."""
        return self.layout.box(self.mesh.rank)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return self.local.is_floating_point()

    def __len__(self) -> int:
        return self.shape[0]

    def item(self) -> float:
        """The value of a tensor of one element, e.g. a loss."""
        return float(self.gather().item())

    def backward(self, gradient: torch.Tensor | None = None) -> None:
        """Backpropagate from a tensor that every rank holds whole (a loss), or with this rank's gradient shard."""
        self.local.backward(gradient)

    def detach(self) -> Sharded:
        return self.like(self.local.detach())

    def like(self, local: torch.Tensor) -> Sharded:
        """Another tensor of the same layout."""
        return Sharded(local, self.layout, self.mesh)

    def redistribute(self, target: Layout) -> Sharded:
        """The same tensor in another layout; differentiable."""
        if target == self.layout:
            return self
        if (target.mesh, target.shape) != (self.layout.mesh, self.layout.shape):
            raise LayoutError(f"`target` (={target}) must lay out {self.layout.shape} on {self.layout.mesh}.")
        plan = conversion(self.layout, target, self.mesh.rank)
        return Sharded(exchange(self.local, plan, self.mesh), target, self.mesh)

    def with_whole(self, dims: Sequence[int]) -> Sharded:
        """The same tensor with `dims` no longer cut: their axes replicate."""
        return self.redistribute(self.layout.with_whole(dims)) if self.layout.axes_of(dims) else self

    def gather(self) -> torch.Tensor:
        """The whole global tensor, on every rank; differentiable."""
        return self.redistribute(Layout.of(self.mesh.mesh, self.layout.shape)).local

    __add__, __radd__ = _operator(torch.add), _operator(torch.add, swapped=True)
    __sub__, __rsub__ = _operator(torch.sub), _operator(torch.sub, swapped=True)
    __mul__, __rmul__ = _operator(torch.mul), _operator(torch.mul, swapped=True)
    __truediv__, __rtruediv__ = _operator(torch.div), _operator(torch.div, swapped=True)
    __pow__, __rpow__ = _operator(torch.pow), _operator(torch.pow, swapped=True)
    __lt__, __le__, __gt__, __ge__ = (_operator(f) for f in (torch.lt, torch.le, torch.gt, torch.ge))
    __eq__, __ne__ = _operator(torch.eq), _operator(torch.ne)
    __getitem__ = _operator(operator.getitem)
    __hash__ = object.__hash__

    def __neg__(self) -> Sharded:
        result: Sharded = handler_of(torch.neg)(self)
        return result

    def __bool__(self) -> bool:
        return bool(self.gather())

    def __float__(self) -> float:
        return self.item()


_DTENSOR = (
    "a DTensor cannot take part in a split operator: torch's convolution on spatially sharded DTensors returns wrong "
    "numbers without an error. Pass `x.to_local()` through `from_local(local, layout, mesh)`, or `x.full_tensor()` "
    "through `shard(x, mesh, cut)`."
)


def _refuse_dtensor(value: object) -> None:
    if isinstance(value, DTensor):
        raise UnsupportedError(_DTENSOR)


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
    # A plain slice: no memory of the whole tensor is kept.
    return Sharded(tensor[layout.box(mesh.rank).slices()].clone(), layout, mesh)


def from_local(local: torch.Tensor, layout: Layout, mesh: OpenMesh) -> Sharded:
    """A shard that this rank already has (it read it, say). Checked on all ranks together, so that none hangs."""
    _refuse_dtensor(local)
    problem, expected = _wrong_mesh(layout, mesh), layout.box(mesh.rank).shape
    if not problem and tuple(local.shape) != expected:
        problem = f"`local` has shape {tuple(local.shape)}, but {layout} gives this rank {expected}"
    mesh.agree("`from_local`", _identity(layout, local), problem)
    return Sharded(local, layout, mesh)


def _wrong_mesh(layout: Layout, mesh: OpenMesh) -> str | None:
    return None if layout.mesh == mesh.mesh else f"the layout is for {layout.mesh}, but the open mesh is {mesh.mesh}"


def _identity(layout: Layout, tensor: torch.Tensor) -> str:
    """What ranks must agree on about a tensor, or a later exchange would hang: backward is one too."""
    learns = " with gradient" if tensor.requires_grad else ""
    return f"{layout} cut at {[cut.partition.bounds for cut in layout.cuts]}, {tensor.dtype}{learns}"


def replicated(tensor: torch.Tensor, mesh: OpenMesh) -> Sharded:
    """A tensor that every rank holds whole, such as a weight."""
    _refuse_dtensor(tensor)
    return Sharded(tensor, replicated_layout(mesh.mesh, tuple(tensor.shape)), mesh)


def on_mesh(value: Sharded | torch.Tensor, mesh: OpenMesh) -> Sharded:
    """An operand as a shard: plain tensors count as replicated."""
    return value if isinstance(value, Sharded) else replicated(value, mesh)
