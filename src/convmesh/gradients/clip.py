"""Clipping by the norm of all gradients, of whole and of cut weights, each value counted once.

`torch.nn.utils.clip_grad_norm_` refuses plain tensors and DTensors together, and knows nothing of pipeline stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from convmesh.dist import OpenMesh, all_reduce
from convmesh.errors import LayoutError
from convmesh.gradients.local_gradients import local_gradient
from convmesh.private_torch.tensor_internals import multiply_all_, norms_of

Axes = tuple[str, ...]
Held = Sequence[tuple[torch.Tensor, Axes]]


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    mesh: OpenMesh,
) -> torch.Tensor:
    """Scale gradients so that their norm over the whole network is at most `max_norm`; gives the norm before.

    Call it on every rank of the mesh with the parameters that the rank holds; the norm is the same on all of them.
    """
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    held = [(p, distinct_axes(p)) for p in chosen if p.grad is not None]
    return clip_held_(held, max_norm, norm_type, error_if_nonfinite, mesh)


def distinct_axes(parameter: torch.Tensor) -> Axes:
    """The axes along which ranks hold different parts of a parameter; along the others they hold the same."""
    if not isinstance(parameter, DTensor):
        return ()
    names = parameter.device_mesh.mesh_dim_names or ()
    return tuple(name for name, place in zip(names, parameter.placements, strict=True) if place.is_shard())


@torch.no_grad()
def clip_held_(held: Held, max_norm: float, norm_type: float, error_if_nonfinite: bool, mesh: OpenMesh) -> torch.Tensor:
    """Clip the gradients of parameters, of which ranks hold different parts along the axes given with each."""
    norm = _total_norm(held, float(norm_type), mesh)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the {norm_type}-norm of all gradients is {norm.item()}, so they cannot be clipped; "
            "error_if_nonfinite=False scales them all the same."
        )
    grads = [local_gradient(p) for p, _ in held]
    if grads:
        # As torch: without a branch, so that nothing waits for a GPU.
        multiply_all_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(grads[0].device))
    return norm


def _total_norm(held: Held, norm_type: float, mesh: OpenMesh) -> torch.Tensor:
    """In float64. Of ranks that hold the same values one speaks, so that one all-reduce over the mesh serves all."""
    if not norm_type > 0:
        raise LayoutError(f"`norm_type` (={norm_type}) must be positive, e.g. 2.0, or math.inf for the largest value.")
    grads = [local_gradient(p) for p, distinct in held if _speaks(mesh, distinct)]
    norms = [n.double() for n in norms_of([g for g in grads if g.numel()], norm_type)] if grads else []
    parts = torch.stack([n.to(mesh.device) for n in norms]) if norms else torch.zeros(1, device=mesh.device).double()
    axes = tuple(mesh.mesh.axes)
    if math.isinf(norm_type):
        # A maximum may lose a NaN on its way, so that travels apart.
        pair = torch.stack([parts.nan_to_num(0.0, posinf=math.inf).max(), parts.isnan().any().double()])
        largest, has_nan = all_reduce(pair, mesh, axes, dist.ReduceOp.MAX)
        return torch.where(has_nan > 0, torch.full_like(largest, math.nan), largest)
    return all_reduce(parts.pow(norm_type).sum(), mesh, axes).pow(1.0 / norm_type)


def _speaks(mesh: OpenMesh, distinct: Axes) -> bool:
    here = mesh.mesh.coordinates(mesh.rank)
    return all(place == 0 for axis, place in here.items() if axis not in (*distinct, "pipe"))
