"""Parameters and gradients on this rank: whole tensors, or its shards of cut weights."""

from __future__ import annotations

import torch

from convmesh.errors import UnsupportedError
from convmesh.private_torch.dtensors import is_dtensor
from convmesh.private_torch.tensor_internals import local_shard


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor: the same memory, not a copy."""
    local = local_shard(tensor) if is_dtensor(tensor) else tensor
    return local.detach() if local.requires_grad else local


def address_of(tensor: torch.Tensor) -> int:
    """The address of this rank's shard of a tensor."""
    return local_shard(tensor).data_ptr() if is_dtensor(tensor) else tensor.data_ptr()


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient of this rank's shard of a parameter, which must have one."""
    grad = parameter.grad
    assert grad is not None
    if grad.layout != torch.strided:
        raise UnsupportedError(
            f"a gradient of layout {grad.layout} (parameter of shape {tuple(parameter.shape)}) cannot be reduced in "
            "buckets; use dense gradients, e.g. nn.Embedding(sparse=False)."
        )
    if is_dtensor(grad) and is_dtensor(parameter) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return local_of(grad)


def as_gradient_of(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A local tensor as a gradient of the parameter: a DTensor for a cut weight."""
    if not is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor  # loaded already, by the parameter

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values fill one run of memory without gaps, in any order of dims."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def shaped_like(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A run of values in the shape of `tensor`, and with its strides if it is dense."""
    if is_dense(tensor):
        return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())
    return flat.view(tensor.shape)
