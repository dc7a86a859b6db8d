"""Backward of a pipeline's stage in two parts: zero-bubble schedules call these, and so must their dry runs.

Loaded when first called: torch's pipelines take long to import, and few plans need them.
"""

from __future__ import annotations

from typing import Any


def stage_backward_input(*args: Any) -> tuple[Any, Any]:
    """The gradients of a stage's inputs, and what is left to do for its weights."""
    from torch.distributed.pipelining._backward import stage_backward_input as first_part

    return first_part(*args)


def stage_backward_weight(*args: Any) -> Any:
    """The gradients of a stage's weights, from what `stage_backward_input` left."""
    from torch.distributed.pipelining._backward import stage_backward_weight as second_part

    return second_part(*args)


def needs_every_gradient() -> bool:
    """Whether a stage must have a gradient for each input (torch 2.11); later releases send zeros where it has none."""
    from torch.distributed.pipelining import PipelineStage

    return not hasattr(PipelineStage, "_get_grad_send_meta")
