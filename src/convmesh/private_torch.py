"""Every use of a private part of torch, in one place, each with its reason.

A torch release may change any of these. `tests/test_private_torch.py` tries each by name, so that a release that breaks
one says which.
"""

from __future__ import annotations

import linecache
import weakref

from torch import fx

# torch.fx keeps the text of every module that it compiles, for tracebacks, for as long as the process lives.
from torch.fx.graph_module import _loader as _fx_sources

# Nested arguments and results of a model, walked as torch.fx and torch.export walk them; there is no public spelling.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten


def forget_source_of(module: fx.GraphModule) -> None:
    """Drop the text of a graph's forward when `module` is freed: call it whenever the graph has been compiled."""
    weakref.finalize(module, _forget_source, module.forward.__code__.co_filename).atexit = False


def sources_kept() -> int:
    """The number of graphs whose text torch.fx keeps."""
    return len(_fx_sources.eval_cache)


def _forget_source(name: str) -> None:
    _fx_sources.eval_cache.pop(name, None)
    linecache.cache.pop(name, None)
