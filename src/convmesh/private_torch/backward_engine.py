"""What the autograd engine does around a backward pass: DDP uses the same calls, and none is public."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import autograd


def backward_number() -> int:
    """The number of the backward pass under way in this thread, which distinguishes it from one inside another."""
    return torch._C._current_graph_task_id()


def running_node() -> Any:
    """The node of the graph whose backward is running, or None between passes."""
    return torch._C._current_autograd_node()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back when the backward pass under way ends, before `backward()` returns."""
    autograd.Variable._execution_engine.queue_callback(callback)


def keeps_its_graph(function: Any) -> bool:
    """Whether a node written in Python still knows its inputs after the graph around it is freed (2.13 and later)."""
    try:
        return function is not None and bool(function._input_metadata)
    except RuntimeError:
        return False


def will_run(node: Any) -> bool:
    """Whether the backward pass under way will reach a node: one for chosen inputs leaves others out."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # `autograd.grad` captures a leaf's gradient instead
        return False


def hooks_on_gradient(leaf: torch.Tensor) -> int:
    """How many hooks see or change a leaf's gradient."""
    before, after = leaf._backward_hooks, leaf._post_accumulate_grad_hooks
    return len(before or ()) + len(after or ())
