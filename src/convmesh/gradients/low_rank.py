"""Sums of gradients in low rank, for slow links: PowerSGD (Vogels, Karimireddy and Jaggi, NeurIPS 2019) on buckets.

A gradient of n×m values travels as n×r and m×r. Each rank keeps what is lost and adds it to its next gradient (error
feedback), and the m×r values of a step are the first guess for the next one (warm start).

torch's own hook (`ddp_comm_hooks.powerSGD_hook`) would run on a stand-in for DDP's bucket, but it posts its collectives
itself: no dry run could count them, and it sends whole gradients in its first steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from convmesh.dist import OpenMesh
from convmesh.dist.flat_buffers import FlatBuffer, Flight, start_sum
from convmesh.gradients.buckets import Axes, Bucket, Slot, SummedBucket
from convmesh.gradients.reduction import AxesOf, GradientReducer


@dataclass(frozen=True)
class Factored:
    """A gradient as a matrix, and the two that travel in its place: their product approximates it at their rank."""

    gradient: torch.Tensor
    """This rank's part, n×m; at the end, the approximate sum, the same on all ranks."""
    error: torch.Tensor
    """What has not been sent yet, n×m."""
    left: torch.Tensor
    """n×r: gradient · right, and then an orthonormal basis of its columns."""
    right: torch.Tensor
    """m×r: gradientᵀ · left; the next step begins with it."""

    def begin(self) -> None:
        self.gradient.add_(self.error)
        torch.mm(self.gradient, self.right, out=self.left)

    def turn(self) -> None:
        """After the sum of `left`. What the basis does not capture on this rank stays here as the error."""
        self.left.copy_(torch.linalg.qr(self.left).Q)
        torch.mm(self.gradient.T, self.left, out=self.right)
        torch.addmm(self.gradient, self.left, self.right.T, alpha=-1, out=self.error)

    def end(self) -> None:
        """After the sum of `right`."""
        torch.mm(self.left, self.right.T, out=self.gradient)


class LowRankBucket(SummedBucket):
    """Two all-reduces of factors. Weights whose factors would be no smaller travel whole, with the first."""

    def __init__(self, slots: list[Slot], mesh: OpenMesh, axes: Axes, dtype: torch.dtype, rank: int) -> None:
        self._rank = rank
        self._factored: dict[Slot, Factored] = {}
        super().__init__(slots, mesh, axes, dtype)

    def _lay_out(self, locals_: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        rank, shapes = self._rank, [_matrix(local, self._rank) for local in locals_]
        cut = [shape for shape in shapes if shape is not None]
        first = [
            local.numel() if shape is None else shape[0] * rank for local, shape in zip(locals_, shapes, strict=True)
        ]
        self.buffer = FlatBuffer(sum(first) + len(first), dtype, self.mesh)
        *lefts, self._counts = self.buffer.values.split([*first, len(first)])
        self._second = FlatBuffer(sum(columns * rank for _, columns in cut), dtype, self.mesh)
        rights = iter(self._second.values.split([columns * rank for _, columns in cut]))
        runs = []
        for slot, shape, left in zip(self.slots, shapes, lefts, strict=True):
            if shape is not None:
                self._factored[slot] = self._factor(shape, left, next(rights))
            runs.append(left if shape is None else self._factored[slot].gradient.view(-1))
        return runs

    def _factor(self, shape: tuple[int, int], left: torch.Tensor, right: torch.Tensor) -> Factored:
        rows, columns = shape
        right = right.view(columns, self._rank)
        if not self.mesh.is_dry:  # the same on all ranks that sum together
            seeded = torch.Generator().manual_seed(len(self._factored))
            right.copy_(torch.randn(columns, self._rank, generator=seeded))
        gradient, error = (torch.zeros(shape, dtype=left.dtype, device=left.device) for _ in range(2))
        return Factored(gradient, error, left.view(rows, self._rank), right)

    @property
    def elements(self) -> int:
        return self.buffer.values.numel() + self._second.values.numel()

    def _post(self) -> Flight:
        for each in self._factored.values():
            each.begin()
        return super()._post()

    def relay(self) -> None:
        self._flight.wait()
        for each in self._factored.values():
            each.turn()
        if self._factored:
            self._flight = start_sum(self._second, self.mesh, self.axes)

    def finish(self) -> None:
        self._flight.wait()
        for each in self._factored.values():
            each.end()
        super().finish()

    def _publish(self, slot: Slot, is_present: bool) -> None:
        if not is_present and slot.speaks and slot in self._factored:  # nobody will read the old errors that were sent
            self._factored[slot].error.add_(self._factored[slot].gradient)
        super()._publish(slot, is_present)

    def forget(self) -> None:
        """Drop what has not been sent."""
        for each in self._factored.values():
            each.error.zero_()


class LowRankReducer(GradientReducer):
    """Sums gradients in low rank. The result is not the exact sum, and depends on earlier steps."""

    remembers = True

    def __init__(self, mesh: OpenMesh, axes_of: AxesOf, rank: int, **options: Any) -> None:
        self._rank = rank
        super().__init__(mesh, axes_of, **options)

    def _travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """Bases are not computed in half precision."""
        return dtype if dtype.itemsize > 2 else torch.float32

    def _bucket(self, slots: list[Slot], axes: Axes, dtype: torch.dtype) -> Bucket:
        return LowRankBucket(slots, self.mesh, axes, dtype, self._rank)

    def reset(self) -> None:
        super().reset()
        for bucket in self.buckets:
            assert isinstance(bucket, LowRankBucket)
            bucket.forget()


def _matrix(local: torch.Tensor, rank: int) -> tuple[int, int] | None:
    """The matrix that a weight is treated as: its first dim by the others; None if its factors are no smaller."""
    if local.dim() < 2 or local.is_complex() or not local.numel():
        return None
    rows = local.shape[0]
    columns = local.numel() // rows
    return (rows, columns) if (rows + columns) * rank < rows * columns else None
