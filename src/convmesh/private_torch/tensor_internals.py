"""What tensors and their storages reveal only through private API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Subclass = TypeVar("Subclass", bound=torch.Tensor)


no_overrides: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of tensor subclasses that override no function, as `nn.Parameter` has it."""


def storage_key(storage: torch.UntypedStorage) -> int:
    """The identity of the memory itself: its Python objects come and go, and meta tensors have no address."""
    key: int = storage._cdata
    return key


def memory_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory."""
    return storage_key(tensor.untyped_storage())


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor's values were changed in place: autograd counts it."""
    version: int = tensor._version
    return version


def unseen_view(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    """A view that dispatch modes do not see: it means nothing to them, and telling them takes ten times as long."""
    guard = torch._C._DisableTorchDispatch()
    try:
        return tensor.as_strided(shape, strides, offset)
    finally:
        del guard


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd considers a tensor a view of another, which it does not let anyone overwrite freely."""
    return bool(tensor._is_view())


def local_shard(tensor: DTensor) -> torch.Tensor:
    """This rank's memory of a DTensor; `to_local` would record a step of autograd."""
    local: torch.Tensor = tensor._local_tensor
    return local


def as_subclass_leaf(kind: type[Subclass], data: torch.Tensor, learns: bool) -> Subclass:
    """A leaf of a tensor subclass; `as_subclass` makes one that is not a leaf."""
    made: Subclass = torch.Tensor._make_subclass(kind, data, learns)
    return made


def multiply_all_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply many tensors in place with one kernel, as torch's own clipping does."""
    torch._foreach_mul_(list(tensors), factor)


def copy_all_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy many tensors with one kernel for each pair of types.

    A tensor with other strides than its target would make torch copy all of them one by one.
    """
    alike: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.stride() == source.stride():
            alike.setdefault((target.dtype, source.dtype), []).append((target, source))
        else:
            target.copy_(source)
    for pairs in alike.values():
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def norms_of(tensors: Sequence[torch.Tensor], norm_type: float) -> tuple[torch.Tensor, ...]:
    """The norms of many tensors, with one kernel."""
    norms: Any = torch._foreach_norm(list(tensors), norm_type)
    return tuple(norms)


def occupy_gpu(cycles: int) -> None:
    """Keep the current CUDA stream busy, so that calls queue behind it and then run back to back."""
    torch.cuda._sleep(cycles)
