"""torch's tensors that are cut over ranks, recognised without importing them.

Their import takes as long as a small plan. Only a user's first DTensor, or the first weight that is cut, pays for it:
while the module is not loaded, no tensor can be one.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

_MODULE = "torch.distributed.tensor"


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Whether a value is a DTensor."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)


def is_dtensor_type(kind: type) -> bool:
    """Whether a tensor type is DTensor or a subclass."""
    module = sys.modules.get(_MODULE)
    return module is not None and issubclass(kind, module.DTensor)


def cut_dim(placement: Placement) -> int | None:
    """The dim of a DTensor that one axis of its mesh cuts, if it cuts any."""
    dim: int | None = getattr(placement, "dim", None) if placement.is_shard() or blocks_of(placement) > 1 else None
    return dim


def in_blocks(dim: int, blocks: int) -> Placement:
    """A dim cut in each of several equal blocks: a rank has the same part of every block, one after the other.

    Torch has this placement for views of tensors whose inner dim is cut, but no public name for it.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=blocks)


def blocks_of(placement: Placement) -> int:
    """The number of blocks in which a placement cuts its dim."""
    return int(getattr(placement, "split_factor", 1))
