"""Sums over mesh axes and their adjoints.

Gradients follow one rule: a tensor that is equal on several ranks has a gradient that is equal on them too. So the
adjoint of a sum over ranks is the identity, and copies used for different work on different ranks sum their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from convmesh.dist.host_lines import HostLine, LineSum
from convmesh.dist.launching import Flying, Launched, Tensors, launch
from convmesh.dist.open_mesh import OpenMesh
from convmesh.dist.traffic import all_reduce_bytes
from convmesh.dist.wire import settled

Axes = tuple[str, ...]


class Reduction:
    """An all-reduce in progress over several tensors of one type, packed into one buffer."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], mesh: OpenMesh, axes: Axes, op: Any = dist.ReduceOp.SUM
    ) -> None:
        self._shapes = [t.shape for t in tensors]
        self._device = tensors[0].device
        ranks = mesh.mesh.extent(axes)
        self._alone = [t.detach() for t in tensors] if ranks == 1 else None
        self._posted: tuple[int, ...] = ()
        if self._alone is not None:
            return
        flat = [t.detach().reshape(-1) for t in tensors]
        packed = torch.cat(flat) if len(flat) > 1 else settled(flat[0]).clone()
        buffer = packed.cpu() if mesh.stages_through_host else packed
        bytes_sent = all_reduce_bytes(packed.numel(), packed.element_size(), ranks)
        self._traffic = mesh.traffic
        if mesh.is_dry:
            self._posted = (mesh.traffic.record("all_reduce", bytes_sent, axes),)
            self._launched: Launched = Flying((), [], [buffer])
        else:
            in_place = [buffer]
            self._launched = launch(partial(_post_sum, mesh, axes, bytes_sent, op), in_place, in_place)

    def wait(self) -> list[torch.Tensor]:
        """The sums, in the shapes of the tensors."""
        if self._alone is not None:
            return self._alone
        self._traffic.awaited(self._posted)
        (buffer,) = self._launched.wait()
        sizes = [s.numel() for s in self._shapes]
        pieces = buffer.to(self._device).split(sizes) if len(sizes) > 1 else (buffer.to(self._device),)
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]


def _post_sum(mesh: OpenMesh, axes: Axes, bytes_sent: int, op: Any, sent: Tensors, received: Tensors) -> list[Any]:
    del received  # in place
    mesh.traffic.record("all_reduce", bytes_sent, axes)
    line = _line_of_two(mesh, axes, sent[0]) if op == dist.ReduceOp.SUM else None
    if line is not None:
        return [LineSum(line, f"sum over {axes}", sent[0])]
    return [dist.all_reduce(sent[0], op, group=mesh.group(axes), async_op=True)]


def _line_of_two(mesh: OpenMesh, axes: Axes, buffer: torch.Tensor) -> HostLine | None:
    """The line to the only other rank; the sum of more has an order, which is the backend's to choose."""
    if mesh.mesh.extent(axes) != 2 or buffer.dtype == torch.bool:
        return None
    (other,) = (rank for rank in mesh.mesh.group(axes, mesh.rank) if rank != mesh.rank)
    return mesh.line(other, buffer.nbytes)


def all_reduce(tensor: torch.Tensor, mesh: OpenMesh, axes: Axes, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """The sum (or another reduction) over the ranks along `axes`, on each of them; not differentiable."""
    if mesh.mesh.extent(axes) == 1:
        return tensor.detach()
    return Reduction([tensor], mesh, axes, op).wait()[0]


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, mesh: OpenMesh, axes: Axes) -> torch.Tensor:
        del ctx
        return all_reduce(partial, mesh, axes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        del ctx
        return grad, None, None


class _CopyOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: OpenMesh, axes: Axes, *copies: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.mesh, ctx.axes = mesh, axes
        return tuple(copy.view_as(copy) for copy in copies)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *Reduction(grads, ctx.mesh, ctx.axes).wait()


def sum_over(partial: torch.Tensor, mesh: OpenMesh, axes: Axes) -> torch.Tensor:
    """The sum of the ranks' partial results along `axes`; differentiable."""
    if mesh.mesh.extent(axes) == 1:
        return partial
    result: torch.Tensor = _SumOver.apply(partial, mesh, axes)
    return result


def copy_over(mesh: OpenMesh, axes: Axes, *copies: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Tensors equal along `axes` (weights), about to be used for different work there; backward sums gradients."""
    learning = [i for i, c in enumerate(copies) if c is not None and c.requires_grad]
    if mesh.mesh.extent(axes) == 1 or not learning:
        return copies
    marked = list(copies)
    # A dict, not a set: gradients must be summed in the same order on every rank.
    for dtype in dict.fromkeys(c.dtype for c in copies if c is not None):
        chosen = [i for i in learning if (c := copies[i]) is not None and c.dtype == dtype]
        if chosen:
            for i, copy in zip(chosen, _CopyOver.apply(mesh, axes, *(copies[i] for i in chosen)), strict=True):
                marked[i] = copy
    return tuple(marked)


def weights_over(mesh: OpenMesh, axes: Axes, *weights: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """`copy_over` for weights; if a reducer sums their gradients, the weights themselves."""
    return copy_over(mesh, mesh.weight_axes(axes), *weights)
