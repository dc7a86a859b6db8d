"""The maximum over ranks, with the gradient of one device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from convmesh.dist import OpenMesh, Reduction, all_reduce

NOBODY = torch.iinfo(torch.int64).max
"""The index that a rank without values contributes."""


def elect(
    values: torch.Tensor, indices: torch.Tensor, mesh: OpenMesh, axes: tuple[str, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ranks' largest values along `axes` and their global indices; only the winning rank's values get gradients.

    As on one device, the first of equal values wins; NaN beats every number, and the last NaN wins.
    """
    if mesh.mesh.extent(axes) == 1:
        return values, indices
    own = values.detach()
    is_nan = own.isnan()
    top, any_nan = Reduction(
        [own.nan_to_num(-torch.inf, torch.inf, -torch.inf), is_nan.to(own.dtype)], mesh, axes, dist.ReduceOp.MAX
    ).wait()
    top = torch.where(any_nan > 0, torch.nan, top)
    is_candidate = is_nan | (own == top)
    # The least claim wins; claims of NaN are below all others and decrease with the index.
    claims = torch.where(is_nan, -1 - indices, indices)
    least = all_reduce(torch.where(is_candidate, claims, NOBODY), mesh, axes, dist.ReduceOp.MIN)
    winner = torch.where(least < 0, -1 - least, least)
    return torch.where(indices == winner, values, top), winner
