"""Trains a reference network for a few steps, whole or split, for tests of exactness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

import convmesh as cm
from convmesh import models
from convmesh.testing import RankPool
from tests.draws import IS_FULL

STEPS = 3 if IS_FULL else 2
"""The second starts from weights and momentum that the first has changed."""

SHALLOW: dict[str, dict[str, Any]] = {
    "densenet121": {"blocks": (2, 2, 3, 2)},
    "convnext-tiny": {"blocks": (1, 1, 2, 1)},
}
"""Fewer of the same layers in a row; `make test-full` has as many as were published."""


@dataclass(frozen=True)
class Trained:
    """Losses of all steps, the weights after the last, and the first gradients."""

    losses: list[float]
    state: dict[str, torch.Tensor] = field(repr=False)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)


def fresh(name: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor, Any]:
    """A small reference network in float64, its batch, target and loss: the same in every process."""
    torch.manual_seed(1)
    small = models.find(name).small()
    model = small.create(**({} if IS_FULL else SHALLOW.get(name, {}))).double()
    return model, small.draw_input(), small.draw_target(), small.task.loss()


def optimizer(parameters: Any, rate: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def rate_of(name: str) -> float:
    """A rate at which rounding errors do not grow: with batch norm on few values they can by a factor of millions."""
    return models.find(name).small().rate


def take_steps(
    opt: torch.optim.Optimizer,
    loss_of: Callable[[], torch.Tensor],
    steps: int = STEPS,
    after_backward: Callable[[int], object] | None = None,
) -> list[float]:
    """Losses of the optimiser steps; `after_backward` may look at the gradients of each."""
    losses = []
    for step in range(steps):
        opt.zero_grad()
        loss = loss_of()
        loss.backward()
        if after_backward is not None:
            after_backward(step)
        opt.step()
        losses.append(loss.item())
    return losses


def train_whole(name: str, steps: int = STEPS) -> Trained:
    """Train in one process with plain torch."""
    model, x, target, loss_of = fresh(name)
    gradients: dict[str, torch.Tensor] = {}

    def note(step: int) -> None:
        if step == 0:
            gradients.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    opt = optimizer(model.parameters(), rate_of(name))
    losses = take_steps(opt, lambda: loss_of(model(x), target), steps, note)
    return Trained(losses, {k: v.detach().clone() for k, v in model.state_dict().items()}, gradients)


def train_split(
    name: str, mesh: cm.Mesh, strategy: Any, options: dict[str, Any] | None = None, compiling: bool | str = False
) -> Trained:
    """Train on this rank of a mesh, as a user would."""
    model, x, target, loss_of = fresh(name)
    plan = cm.plan(model, tuple(x.shape), mesh, strategy, **(options or {}))
    net = cm.parallelize(model, plan, loss=loss_of, compile=compiling)
    gradients: dict[str, torch.Tensor] = {}

    def note(step: int) -> None:
        if step == 0:
            gradients.update(net.full_gradients())

    args = net.shard_input(x), net.shard_target(target)
    losses = take_steps(optimizer(net.parameters(), rate_of(name)), lambda: net(*args), after_backward=note)
    return Trained(losses, net.full_state_dict(), gradients)


def assert_same(split: list[Trained], whole: Trained, tolerance: float = 1e-9) -> None:
    """Every rank has the single process's losses, first gradients and weights."""
    for rank, trained in enumerate(split):
        losses = torch.tensor(trained.losses), torch.tensor(whole.losses)
        torch.testing.assert_close(*losses, rtol=tolerance, atol=tolerance, msg=f"losses of rank {rank}: {losses}")
        _assert_close(trained.state, whole.state, tolerance, f"weight of rank {rank}")
        if trained.gradients:
            _assert_close(trained.gradients, whole.gradients, tolerance, f"gradient of rank {rank}")


def _assert_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float, what: str
) -> None:
    """Relative to the largest value of each tensor."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = float(value.abs().max()) + 1e-6 if value.numel() else 1.0
        error = float((found[name] - value).abs().max()) / scale if value.numel() else 0.0
        assert error < tolerance, f"{what}, {name}: relative error {error:.1e}"


class References:
    """Single-process results, computed once per network."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool
        self._known: dict[str, Trained] = {}

    def __getitem__(self, name: str) -> Trained:
        if name not in self._known:
            (self._known[name],) = self._pool.run(train_whole, name)
        return self._known[name]


def values_of_steps(
    net: cm.ParallelNet, batch: Callable[[cm.ParallelNet, int], tuple[Any, Any]], steps: Sequence[tuple[int, float]]
) -> list[torch.Tensor]:
    """Losses and gradients of steps that accumulate: of so many samples each, the second loss times a factor.

    With a factor of 1 both gradients are summed over ranks, with others once for the two.
    """
    optimizer = net.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    values: list[torch.Tensor] = []
    for samples, factor in steps:
        net.zero_grad()
        with net.no_sync() if factor != 1 else nullcontext():
            first = net(*batch(net, samples))
            first.backward()
        second = net(*batch(net, samples))
        (second * factor).backward()
        values += [first.detach(), second.detach(), *(g.clone() for g in net.full_gradients().values())]
        optimizer.step()
    return values
