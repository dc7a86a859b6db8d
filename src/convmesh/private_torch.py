"""Every use of a private part of torch, in one place, each with its reason.

A torch release may change any of these. `tests/test_private_torch.py` tries each by name, so that a release that breaks
one says which.
"""

from __future__ import annotations

# How torch reads the arguments of `Tensor.to`, as `nn.Module.to` does: device, dtype, non_blocking, memory_format.
from torch._C._nn import _parse_to as parse_to  # noqa: F401

# The store at which a job's ranks found each other: the one place to meet before any process group is opened.
from torch.distributed.distributed_c10d import _get_default_store as default_store  # noqa: F401

# Nested arguments and results of a model, walked as torch.fx and torch.export walk them; there is no public spelling.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten
