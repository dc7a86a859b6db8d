"""Small runs that save, and go on elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Checkpointer, Mesh, models
from tests.runtime.pipelines import Small

SAMPLES = 8


class Little(nn.Module):
    """Norm statistics, dropout, a dense layer, a shared weight and a scalar: what a checkpoint may meet."""

    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.enter = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.twice = nn.Conv2d(6, 6, 3, padding=1)
        self.again = nn.Conv2d(6, 6, 3, padding=1)
        self.again.weight = self.twice.weight
        self.drop = nn.Dropout(dropout)
        self.dense = nn.Linear(6 * 8 * 8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.enter(x)))
        y = self.again(F.relu(self.twice(y)))
        return self.dense(self.drop(y).flatten(1))  # type: ignore[no-any-return]


def fused() -> nn.Module:
    """A Transformer, whose projections are cut block by block."""
    return models.create("vit", channels=2, classes=3, extent=8, patch=2, features=8, heads=2, blocks=1)


class Run:
    """A network, its optimiser and its data, the same batch for every step number on every mesh."""

    def __init__(
        self,
        mesh: Mesh,
        strategy: Any,
        kind: Any = torch.optim.AdamW,
        network: Any = Little,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        torch.manual_seed(3)
        model = network().double()
        self.labels = (SAMPLES, 8, 8) if network is Small else (SAMPLES,)
        plan = cm.plan(model, (SAMPLES, 2, 8, 8), mesh, strategy, **options)
        self.device = device
        self.net = cm.parallelize(model, plan, loss=F.cross_entropy, mesh=cm.open_mesh(mesh, device=device))
        self.net.manual_seed(5)
        rates: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        self.optimizer = self.net.optimizer(kind, lr=0.02, **rates)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def step(self, number: int) -> float:
        draw = torch.Generator().manual_seed(number)
        x = torch.randn(SAMPLES, 2, 8, 8, dtype=torch.float64, generator=draw)
        target = torch.randint(0, 3, self.labels, generator=draw)
        loss = self.net(self.net.shard_input(x.to(self.device)), self.net.shard_target(target.to(self.device)))
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def steps(self, first: int, last: int) -> list[float]:
        return [self.step(number) for number in range(first, last)]

    def save(self, at: Checkpointer, number: int) -> None:
        at.save(number, self.net, self.optimizer, {"step": number, "schedule": self.schedule.state_dict()})

    def load(self, at: Checkpointer, step: int | None = None) -> int:
        state = at.load(self.net, self.optimizer, step)
        if state is None:
            return 0
        self.schedule.load_state_dict(state["schedule"])
        return int(state["step"])


def save_run(folder: Path, mesh: Mesh, strategy: Any, options: dict[str, Any]) -> list[float]:
    """Three steps, a save behind the next three; the losses of those."""
    run = Run(mesh, strategy, **options)
    run.steps(0, 3)
    checkpoints = Checkpointer(folder)
    run.save(checkpoints, 3)
    losses = run.steps(3, 6)
    checkpoints.wait()
    return losses


def continue_run(folder: Path, mesh: Mesh, strategy: Any, options: dict[str, Any]) -> list[float]:
    """The losses after a load."""
    run = Run(mesh, strategy, **options)
    torch.manual_seed(0)
    run.net.manual_seed(0)
    first = run.load(Checkpointer(folder))
    assert first == 3
    return run.steps(first, 6)
