"""Every use of a private part of torch, in one place, each with its reason.

A torch release may change any of these. `tests/test_private_torch.py` tries each by name, so that a release that breaks
one says which.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import distributed_c10d

# Nested arguments and results of a model, walked as torch.fx and torch.export walk them; there is no public spelling.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten


def parse_to(
    *args: Any, **kwargs: Any
) -> tuple[torch.device | None, torch.dtype | None, bool, torch.memory_format | None]:
    """How torch reads the arguments of `Tensor.to`, as `nn.Module.to` does; they may come in any of four forms."""
    read: Any = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype, non_blocking, memory_format = read
    return device, dtype, non_blocking, memory_format


def default_store() -> Any:
    """Where a job's ranks found each other: the one place to meet before any process group is opened."""
    return distributed_c10d._get_default_store()
