"""Clipping by the norm of all gradients, of whole and cut weights, with each value counted once.

`torch.nn.utils.clip_grad_norm_` refuses to mix plain tensors and DTensors, and knows nothing of pipeline stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from convmesh.dist import OpenMesh, all_reduce
from convmesh.errors import LayoutError
from convmesh.gradients.local_gradients import local_gradient
from convmesh.gradients.owners import Axes, Held, held_of, mesh_of
from convmesh.private_torch.tensor_internals import multiply_all_, norms_of


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    mesh: OpenMesh | None = None,
) -> torch.Tensor:
    """Scale gradients so that their norm over the whole network is at most `max_norm`; return the norm before.

    Call it on every rank with the parameters that the rank holds; the norm is the same on all of them. The parameters
    of a parallelized network know their mesh; `mesh` is for weights that have no reducer and are not cut.
    """
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    by_mesh = {_key(mesh): (mesh, chosen)} if mesh is not None else _by_mesh(chosen)
    parts = [(each, [pair for p in members for pair in held_of(p)]) for each, members in by_mesh.values()]
    return clip_held_(parts, max_norm, norm_type, error_if_nonfinite)


def _by_mesh(parameters: Sequence[torch.Tensor]) -> dict[object, tuple[OpenMesh, list[torch.Tensor]]]:
    """Parameters by the ranks that share them; those without a mesh join the first that has one."""
    meshes = [mesh_of(parameter) for parameter in parameters]
    first = next((mesh for mesh in meshes if mesh is not None), None)
    if first is None:
        raise LayoutError(
            f"`parameters` (={len(parameters)} of them) belong to no parallelized network and none is cut, so their "
            "mesh is unknown. Call `net.clip_grad_norm_(max_norm)`, or pass `mesh=`."
        )
    groups: dict[object, tuple[OpenMesh, list[torch.Tensor]]] = {}
    for parameter, mesh in zip(parameters, meshes, strict=True):
        groups.setdefault(_key(mesh or first), (mesh or first, []))[1].append(parameter)
    return groups


def _key(mesh: OpenMesh) -> object:
    """Open meshes of the same shape over the same ranks count as one mesh here."""
    return mesh.mesh, tuple(mesh.world_ranks)


@torch.no_grad()
def clip_held_(
    parts: Sequence[tuple[OpenMesh, Held]], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """Clip the gradients held on each mesh by the norm of all of them together."""
    present = [(mesh, [(tensor, axes) for tensor, axes in held if tensor.grad is not None]) for mesh, held in parts]
    norms = [_total_norm(held, float(norm_type), mesh) for mesh, held in present]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the {norm_type}-norm of all gradients is {norm.item()}, so they cannot be clipped; "
            "error_if_nonfinite=False scales them all the same."
        )
    grads = [local_gradient(tensor) for _, held in present for tensor, _ in held]
    if grads:
        # As in torch, without a branch, so that nothing waits for a GPU.
        multiply_all_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(grads[0].device))
    return norm


def _total_norm(held: Held, norm_type: float, mesh: OpenMesh) -> torch.Tensor:
    """In float64. One of the ranks that hold the same values contributes them, so one all-reduce is enough."""
    if not norm_type > 0:
        raise LayoutError(f"`norm_type` (={norm_type}) must be positive, e.g. 2.0, or math.inf for the largest value.")
    grads = [local_gradient(tensor) for tensor, distinct in held if _contributes(mesh, distinct)]
    norms = [n.double() for n in norms_of([g for g in grads if g.numel()], norm_type)] if grads else []
    parts = torch.stack([n.to(mesh.device) for n in norms]) if norms else torch.zeros(1, device=mesh.device).double()
    axes = tuple(mesh.mesh.axes)
    if math.isinf(norm_type):
        # A maximum over ranks may lose a NaN, so NaNs travel separately.
        pair = torch.stack([parts.nan_to_num(0.0, posinf=math.inf).max(), parts.isnan().any().double()])
        largest, has_nan = all_reduce(pair, mesh, axes, dist.ReduceOp.MAX)
        return torch.where(has_nan > 0, torch.full_like(largest, math.nan), largest)
    return all_reduce(parts.pow(norm_type).sum(), mesh, axes).pow(1.0 / norm_type)


def _contributes(mesh: OpenMesh, distinct: Axes) -> bool:
    here = mesh.mesh.coordinates(mesh.rank)
    return all(place == 0 for axis, place in here.items() if axis not in (*distinct, "pipe"))
