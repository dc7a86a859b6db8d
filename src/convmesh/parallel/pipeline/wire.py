"""What crosses from one stage to the next: this rank's shards of several tensors, side by side in one run a type.

A stage's inputs and outputs are then plain, contiguous and of a size known beforehand, whatever the memory format of
the tensors inside, and each value travels once, in one message with the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from convmesh.dist import OpenMesh
from convmesh.errors import LayoutError
from convmesh.layout import Layout
from convmesh.ops.sharded import Sharded

Flats = tuple[torch.Tensor, ...]


class _Unpacked(torch.autograd.Function):
    """Parts of a run as tensors of their own, without a copy: layers may then work on them in place."""

    @staticmethod
    def forward(ctx: Any, flat: torch.Tensor, shapes: Sequence[torch.Size]) -> Flats:
        ctx.set_materialize_grads(True)
        parts = flat.split([shape.numel() for shape in shapes])
        # `.data`, because autograd forbids in-place work on one of several views.
        return tuple(part.view(shape).data for part, shape in zip(parts, shapes, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        del ctx
        return torch.cat([grad.reshape(-1) for grad in grads]), None


@dataclass(frozen=True)
class Parcel:
    """Names, layouts and types of the tensors that travel together."""

    names: tuple[str, ...]
    layouts: tuple[Layout, ...]
    dtypes: tuple[torch.dtype, ...]

    def _places(self) -> list[tuple[torch.dtype, list[int]]]:
        """By type, in the order in which types first come: which tensors share a run."""
        chosen: dict[torch.dtype, list[int]] = {}
        for index, dtype in enumerate(self.dtypes):
            chosen.setdefault(dtype, []).append(index)
        return list(chosen.items())

    def shapes(self, rank: int) -> list[torch.Size]:
        return [torch.Size(layout.box(rank).shape) for layout in self.layouts]

    def examples(self, rank: int) -> Flats:
        """Runs without data, as a stage is told what it will be given."""
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

    def pack(self, values: Sequence[Sharded], wire: torch.device) -> Flats:
        """The tensors' runs, on the device that messages leave from."""
        for name, value, layout in zip(self.names, values, self.layouts, strict=True):
            if value.layout != layout:
                raise LayoutError(f"{name!r} came out as {value.layout}, but {layout} was planned.")
        locals_ = [value.local.to(dtype) for value, dtype in zip(values, self.dtypes, strict=True)]
        # Always copied: a schedule cuts a stage's outputs off its graph, which cannot be done to views.
        runs = [torch.cat([locals_[i].reshape(-1) for i in places]).to(wire) for _, places in self._places()]
        return tuple(map(_with_gradient, runs))

    def unpack(self, flats: Sequence[torch.Tensor], mesh: OpenMesh) -> list[Sharded]:
        """The tensors from their runs; their gradients travel back as one run again."""
        shapes = self.shapes(mesh.rank)
        found: dict[int, torch.Tensor] = {}
        for flat, (_, places) in zip(flats, self._places(), strict=True):
            parts: Flats = _Unpacked.apply(flat.to(mesh.device), [shapes[i] for i in places])
            found |= dict(zip(places, parts, strict=True))
        return [Sharded(found[index], layout, mesh) for index, layout in enumerate(self.layouts)]


def _with_gradient(flat: torch.Tensor) -> torch.Tensor:
    """What leaves a stage takes part in backward even if no weight before it learns: its gradient is on its way."""
    wants = torch.is_grad_enabled() and flat.is_floating_point() and not flat.requires_grad
    return flat.requires_grad_() if wants else flat


def rows(local: torch.Tensor, count: int) -> list[torch.Tensor]:
    """A rank's samples in equal micro-batches."""
    return list(local.split(local.shape[0] // count)) if local.shape[0] else [local] * count


def parcel_of(names: Sequence[str], layouts: Any, dtypes: Any) -> Parcel:
    """Of nodes that give one tensor each."""
    unique = tuple(dict.fromkeys(itertools.chain(names)))
    return Parcel(unique, tuple(layouts[name][0] for name in unique), tuple(dtypes[name] for name in unique))


__all__ = ["Parcel", "parcel_of", "rows"]
