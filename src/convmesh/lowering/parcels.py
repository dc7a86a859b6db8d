"""What crosses from one stage to the next: this rank's shards of several tensors, side by side in one run per type.

A stage's inputs and outputs are then flat and of known size, and each value travels once, in one message with the
others. Values keep the memory order that the dry run found, so that none is transposed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from convmesh.dist import OpenMesh
from convmesh.errors import LayoutError
from convmesh.kernels.memory_format import Order
from convmesh.layout import Layout
from convmesh.lowering.lowered import Lowered
from convmesh.ops.core.sharded import Sharded

Flats = tuple[torch.Tensor, ...]


def _parts(flat: torch.Tensor, shapes: Sequence[torch.Size], orders: Sequence[Order]) -> list[torch.Tensor]:
    """Views of a run as the consecutive tensors in it, each with its dims in its own order."""
    parts = []
    for part, shape, order in zip(flat.split([shape.numel() for shape in shapes]), shapes, orders, strict=True):
        lying = order or tuple(range(len(shape)))
        outermost_first = part.view([shape[dim] for dim in lying])
        parts.append(outermost_first.permute([lying.index(dim) for dim in range(len(shape))]))
    return parts


def _run_of(tensors: Sequence[torch.Tensor], orders: Sequence[Order]) -> torch.Tensor:
    """The tensors side by side, copied once, whatever their strides."""
    flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    for part, tensor in zip(_parts(flat, [tensor.shape for tensor in tensors], orders), tensors, strict=True):
        part.copy_(tensor)
    return flat


class _Packed(torch.autograd.Function):
    """Tensors as one run; always a copy: a schedule detaches outputs from their graph, which views do not allow."""

    @staticmethod
    def forward(ctx: Any, orders: Sequence[Order], *tensors: torch.Tensor) -> torch.Tensor:
        """Tensors beyond those that have an order are not packed; their gradient is zero."""
        packed, ctx.idle = tensors[: len(orders)], tensors[len(orders) :]
        ctx.orders, ctx.shapes = orders, [tensor.shape for tensor in packed]
        return _run_of(packed, orders)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return None, *_parts(grad, ctx.shapes, ctx.orders), *map(torch.zeros_like, ctx.idle)


class _Unpacked(torch.autograd.Function):
    """Parts of a run as separate tensors, without a copy: layers may then work on them in place."""

    @staticmethod
    def forward(ctx: Any, flat: torch.Tensor, shapes: Sequence[torch.Size], orders: Sequence[Order]) -> Flats:
        ctx.set_materialize_grads(True)
        ctx.orders = orders
        # `.data`, because autograd forbids in-place work on one of several views.
        return tuple(part.data for part in _parts(flat, shapes, orders))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _run_of(grads, ctx.orders), None, None


@dataclass(frozen=True)
class Parcel:
    """Names, layouts, types and orders in memory of the tensors that travel together."""

    names: tuple[str, ...]
    layouts: tuple[Layout, ...]
    dtypes: tuple[torch.dtype, ...]
    orders: tuple[Order, ...]

    def _places(self) -> list[tuple[torch.dtype, list[int]]]:
        """By type, in order of first appearance: which tensors share a run."""
        chosen: dict[torch.dtype, list[int]] = {}
        for index, dtype in enumerate(self.dtypes):
            chosen.setdefault(dtype, []).append(index)
        return list(chosen.items())

    def _orders(self, places: Sequence[int]) -> list[Order]:
        return [self.orders[index] for index in places]

    def shapes(self, rank: int) -> list[torch.Size]:
        return [torch.Size(layout.box(rank).shape) for layout in self.layouts]

    def examples(self, rank: int) -> Flats:
        """Runs without data, which tell a stage what it will receive."""
        shapes = self.shapes(rank)
        return tuple(
            torch.empty(
                sum(math.prod(shapes[i]) for i in places),
                dtype=dtype,
                device="meta",
                requires_grad=dtype.is_floating_point,
            )
            for dtype, places in self._places()
        )

    def pack(self, values: Sequence[Sharded], wire: torch.device, idle: Flats = ()) -> Flats:
        """The tensors' runs, on the device that messages leave from; `idle` takes part in their backward."""
        for name, value, layout in zip(self.names, values, self.layouts, strict=True):
            if value.layout != layout:
                raise LayoutError(f"{name!r} came out as {value.layout}, but {layout} was planned.")
        locals_ = [value.local.to(dtype) for value, dtype in zip(values, self.dtypes, strict=True)]
        extra = {next((dtype for dtype in self.dtypes if dtype.is_floating_point), None): idle}
        runs = [
            _Packed.apply(self._orders(at), *(locals_[i] for i in at), *extra.get(dtype, ())).to(wire)
            for dtype, at in self._places()
        ]
        return tuple(map(_with_gradient, runs))

    def unpack(self, flats: Sequence[torch.Tensor], mesh: OpenMesh) -> list[Sharded]:
        """The tensors from their runs; their gradients travel back as one run again."""
        shapes = self.shapes(mesh.rank)
        tensors: dict[int, torch.Tensor] = {}
        for flat, (_, places) in zip(flats, self._places(), strict=True):
            parts: Flats = _Unpacked.apply(flat.to(mesh.device), [shapes[i] for i in places], self._orders(places))
            tensors |= dict(zip(places, parts, strict=True))
        return [Sharded(tensors[index], layout, mesh) for index, layout in enumerate(self.layouts)]


def _with_gradient(flat: torch.Tensor) -> torch.Tensor:
    """What leaves a stage takes part in backward even if no weight before it learns: its gradient is sent anyway."""
    wants = torch.is_grad_enabled() and flat.is_floating_point() and not flat.requires_grad
    return flat.requires_grad_() if wants else flat


def rows(local: torch.Tensor, count: int) -> list[torch.Tensor]:
    """A rank's samples in equal micro-batches."""
    return list(local.split(local.shape[0] // count)) if local.shape[0] else [local] * count


def parcel_of(names: Sequence[str], lowered: Lowered) -> Parcel:
    """The parcel of nodes that return one tensor each."""
    unique = tuple(dict.fromkeys(names))
    layouts = tuple(lowered.layouts[name][0] for name in unique)
    dtypes, orders = tuple(lowered.dtypes[name] for name in unique), tuple(lowered.orders[name] for name in unique)
    return Parcel(unique, layouts, dtypes, orders)


__all__ = ["Parcel", "parcel_of", "rows"]
