"""The source of compiled graphs, which torch.fx keeps for tracebacks as long as the process lives."""

from __future__ import annotations

import linecache
import weakref

from torch import fx
from torch.fx.graph_module import _loader


def forget_source_of(module: fx.GraphModule) -> None:
    """Drop the source of a graph's forward when `module` is freed: call it whenever the graph has been compiled."""
    weakref.finalize(module, _forget, module.forward.__code__.co_filename).atexit = False


def sources_kept() -> int:
    """The number of graphs whose source torch.fx keeps."""
    return len(_loader.eval_cache)


def _forget(name: str) -> None:
    _loader.eval_cache.pop(name, None)
    linecache.cache.pop(name, None)
