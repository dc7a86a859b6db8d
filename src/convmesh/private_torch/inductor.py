"""Torch's compiler for a graph of ATen operators: `torch.compile` would trace the graph's Python again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

Compiled = Callable[[list[Any]], Sequence[Any]]


def compile_graph(module: fx.GraphModule, example: list[Any], tunes: bool = False, joins: bool = False) -> Compiled:
    """The graph as a function of a list of arguments, which it may empty. Its slow import waits until the first call.

    `tunes` tries more kernels; `joins` puts small independent ones into one launch.
    """
    # Random numbers as eager operators draw them.
    patches = {"fallback_random": True, "max_autotune": tunes, "combo_kernels": joins}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns about torch itself
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(module, example, config_patches=patches)
    boxed = _boxed(compiled)
    if boxed is not None and not any(True for _ in module.buffers()):
        return boxed
    return lambda arguments: compiled(*arguments)


def _boxed(compiled: Any) -> Compiled | None:
    """The inner function that takes its arguments as a list and empties it, so each is freed after its last use."""
    while getattr(compiled, "__qualname__", "").startswith("aot_module_simplified"):
        compiled = getattr(compiled, "__wrapped__", None)
    return compiled if getattr(compiled, "_boxed_call", False) else None
