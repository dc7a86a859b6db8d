"""The few steps that both runs take: forward, backward, update."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from convmesh.verification.observe import Key, Notes, Watcher

RELATIVE_STEP = 0.01
"""The size of the first step relative to the weights: large enough to show, too small to amplify rounding."""

Gradients = Callable[[], Iterable[tuple[str, torch.Tensor]]]


def train(
    step: Callable[[], torch.Tensor | None],
    parameters: list[torch.nn.Parameter],
    rate: Callable[[], float],
    steps: int,
    after_first: Callable[[], None],
    watcher: Watcher,
    notes: Notes,
) -> None:
    """Take `steps` steps of SGD with momentum. `step` runs forward and backward and returns the loss, if any."""
    optimizer: torch.optim.Optimizer | None = None
    for index in range(steps):
        for parameter in parameters:
            parameter.grad = None
        loss = step()
        if loss is not None:
            notes.note(Key("loss", str(index)), loss, ())
        if index == 0:
            after_first()
            watcher.active = False
            learning = [p for p in parameters if p.requires_grad]
            optimizer = torch.optim.SGD(learning, lr=rate(), momentum=0.9) if learning else None
        if optimizer is not None:
            optimizer.step()


def first_rate(parameters: Iterable[torch.nn.Parameter]) -> float:
    """The rate at which the first step changes all weights together by `RELATIVE_STEP`."""
    learning = [p for p in parameters if p.grad is not None]
    if not learning:
        return RELATIVE_STEP
    weights = torch.stack([p.detach().norm() for p in learning]).norm().item()
    gradients = torch.stack([p.grad.norm() for p in learning if p.grad is not None]).norm().item()
    rate = RELATIVE_STEP * weights / gradients if gradients > 0 else RELATIVE_STEP
    return rate if 0 < rate < float("inf") else RELATIVE_STEP
