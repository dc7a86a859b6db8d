"""Changes of type: `to` and `type_as`. A sharded tensor stays on its mesh's device."""

from __future__ import annotations

from typing import Any, cast

import torch

from convmesh.errors import UnsupportedError
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded
from convmesh.private_torch.arguments import parse_to


@implements(torch.Tensor.to)
def to(x: Sharded | torch.Tensor, *targets: Any, copy: bool = False, **options: Any) -> Sharded | torch.Tensor:
    """`x.to(dtype)`, `x.to(device, dtype)` and `x.to(other)`, with torch's options."""
    plain: Any = [target.local if isinstance(target, Sharded) else target for target in targets]
    if not isinstance(x, Sharded):  # `other` is sharded, and a whole tensor stays whole
        whole: Any = x
        return cast(torch.Tensor, whole.to(*plain, copy=copy, **options))
    device, dtype, _, memory_format = parse_to(*plain, **options)
    # Shards of a dry run have no device, so any will do.
    if device is not None and device.type not in (x.device.type, x.mesh.device.type) and not x.mesh.is_dry:
        raise UnsupportedError(
            f"`Tensor.to` (device={str(device)!r}): a Sharded tensor stays on its mesh's device, {x.mesh.device}; "
            f"gather it first, `x.gather().to({str(device)!r})`, or open the mesh there."
        )
    order = torch.preserve_format if memory_format is None else memory_format
    return x.like(x.local.to(dtype=dtype or x.dtype, copy=copy, memory_format=order))


@implements(torch.Tensor.type_as)
def type_as(x: Sharded | torch.Tensor, other: torch.Tensor | Sharded) -> Sharded | torch.Tensor:
    """`x` in the type of another tensor."""
    return x.like(x.local.to(other.dtype)) if isinstance(x, Sharded) else x.to(other.dtype)
