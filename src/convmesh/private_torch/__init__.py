"""Every use of torch's private API, in one place, each with its reason.

A torch release may change any of these. `tests/test_private_torch.py` tries each by name, so that a release that breaks
one says which. No other module may use a private name of torch; the same file checks that.
"""

from convmesh.private_torch.trees import (
    flat_arguments,
    nested_arguments,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

__all__ = ["flat_arguments", "nested_arguments", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
