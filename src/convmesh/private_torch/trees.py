"""Nested arguments and results of a model, walked as torch.fx and torch.export walk them; no public spelling exists."""

from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten
