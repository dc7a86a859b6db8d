"""What is trained on the machine at hand: the programs whose operators a calibration times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from convmesh import models
from convmesh.errors import ConvMeshError
from convmesh.graph import Captured, capture
from convmesh.layout import Mesh
from convmesh.models import Task
from convmesh.oracle.search.candidates import axes_of, factorisations
from convmesh.planner.planning import plan
from convmesh.planner.predicting import Criterion, programs_of, representatives
from convmesh.plans import Program
from convmesh.plans.presets import STRATEGIES


@dataclass(frozen=True)
class Workload:
    """A network and the global batch that it is trained on; its task, where it is known, adds the loss."""

    name: str
    model: nn.Module
    shape: tuple[int, ...]
    task: Task | None = None

    @classmethod
    def reference(cls, name: str, *, small: bool, batch: int | None = None) -> Workload:
        """A reference network as published, or its narrow version on small samples."""
        found = models.find(name)
        made: Any = found.small() if small else found
        sample = found.small_sample if small else found.sample
        with torch.device("meta"):
            return cls(found.name, made.create(), (batch or found.small_batch, *sample), made.task)

    def programs(self, ranks: Sequence[int], device: str) -> Iterator[Program]:
        """Of every strategy that the network has work for on that many ranks, each driving a `device`."""
        captured = capture(self.model, self.shape)
        for count in ranks:
            for strategy, mesh in _meshes(count, len(self.shape) - 2):
                yield from self._lowered(captured, strategy, mesh, device)

    def _lowered(self, captured: Captured, strategy: str, mesh: Mesh, device: str) -> Iterator[Program]:
        try:
            made = plan(captured, self.shape, mesh, strategy)
            ranks = representatives(mesh, borders=True)
            yield from programs_of(made, ranks, self._criterion(), device=device).values()
        except ConvMeshError:  # too few samples, rows or filters for so many ranks: nothing to time
            return

    def _criterion(self) -> Criterion | None:
        if self.task is None:
            return None
        kind = torch.float32 if self.task.kind == "values" else torch.int64
        return Criterion(self.task.loss(), torch.empty(self.task.target_shape(self.shape), dtype=kind, device="meta"))


def _meshes(ranks: int, spatial_dims: int) -> Iterator[tuple[str, Mesh]]:
    """One mesh for each strategy, with the ranks shared out as evenly as can be; one rank has one way to work."""
    if ranks == 1:
        yield "data", Mesh(data=1)
        return
    for strategy in STRATEGIES:
        found = list(factorisations(ranks, axes_of(strategy, spatial_dims)))
        if found:
            yield strategy, Mesh(**min(found, key=lambda axes: max(axes.values())))
