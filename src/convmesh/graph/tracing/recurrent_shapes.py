"""The results of recurrent functions on whole sequences, from one step; without data, torch would make every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

RECURRENCES: frozenset[Callable[..., Any]] = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})

SETTINGS_LAST = 9
"""Arguments of a call on whole sequences; the last says whether samples come first. Packed sequences differ."""


def after_all_steps(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The outputs of all steps, and the last states."""
    x, *rest = args
    time = 1 if args[-1] else 0
    if not isinstance(rest[0], (torch.Tensor, list, tuple)) or isinstance(rest[1], torch.Tensor) or x.dim() != 3:
        return function(*args)
    if x.shape[time] < 2:
        return function(*args)
    outputs, *last = function(x.narrow(time, 0, 1), *rest)
    shape = list(outputs.shape)
    shape[time] = x.shape[time]
    return torch.empty(shape, dtype=outputs.dtype, device=outputs.device), *last
