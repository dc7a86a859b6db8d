"""`F.embedding`: rows of a table of weights, whole or cut, or of a table that is itself computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from convmesh.dist import weights_over
from convmesh.layout import Cut, Layout, Partition
from convmesh.ops.channels.channel_layers import cut_embedding, is_cut
from convmesh.ops.core.probe import probe
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded, on_mesh
from convmesh.ops.product.contraction import Contraction, contract


@implements(F.embedding, takes_cut_weights=True)
def embedding(input: Any, weight: Any, padding_idx: int | None = None, **options: Any) -> Sharded:  # noqa: A002
    """The rows of a table that the indices select."""
    if input.dtype not in (torch.int64, torch.int32):  # torch 2.11 refuses only indices with data
        raise TypeError(f"`input` must be indices, int64 or int32, not {str(input.dtype).removeprefix('torch.')}")
    if is_cut(weight):
        return cut_embedding(input, weight, padding_idx)
    F.embedding(probe(input), probe(weight), padding_idx, **options)
    rows_of: Callable[..., torch.Tensor] = partial(F.embedding, padding_idx=padding_idx, **options)
    if isinstance(weight, Sharded):
        return _of_computed(input, weight, rows_of)
    (table,) = weights_over(input.mesh, input.layout.axes, weight)
    local = rows_of(input.local, table)
    features = Cut((), Partition.even(local.shape[-1], 1))
    return Sharded(local, Layout(input.mesh.mesh, (*input.layout.cuts, features)), input.mesh)


def _of_computed(words: Any, table: Sharded, rows_of: Callable[..., torch.Tensor]) -> Sharded:
    """Rows of an activation: ranks gather those that they need."""
    places = tuple(f"place {dim}" for dim in range(words.dim()))
    terms = Contraction((places, ("row", "feature")), (*places, "feature"), frozenset({"row"}))
    return contract(terms, [on_mesh(words, table.mesh), table], rows_of)
