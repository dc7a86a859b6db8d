"""Networks and batches whose operators a calibration times."""

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
    """A network and the shape of its global batch; its task, if known, adds the loss."""

    name: str
    model: nn.Module
    shape: tuple[int, ...]
    task: Task | None = None

    @classmethod
    def reference(cls, name: str, *, small: bool, batch: int | None = None) -> Workload:
        """A reference network as published, or its narrow version on small samples."""
        model = models.find(name)
        version: Any = model.small() if small else model
        sample = model.small_sample if small else model.sample
        with torch.device("meta"):
            return cls(model.name, version.create(), (batch or model.small_batch, *sample), version.task)

    def programs(self, ranks: Sequence[int], device: str) -> Iterator[Program]:
        """Programs of every strategy that is feasible for each count in `ranks`, on devices of the kind `device`."""
        captured = capture(self.model, self.shape, check=False)
        for count in ranks:
            for strategy, mesh in _meshes(count, len(self.shape) - 2):
                yield from self._lowered(captured, strategy, mesh, device)

    def _lowered(self, captured: Captured, strategy: str, mesh: Mesh, device: str) -> Iterator[Program]:
        try:
            drafted = plan(captured, self.shape, mesh, strategy)
            drawn = representatives(mesh, borders=True)
            yield from programs_of(drafted, drawn, self._criterion(), device=device).values()
        except ConvMeshError:  # too few samples, rows or filters for this mesh: nothing to time
            return

    def _criterion(self) -> Criterion | None:
        if self.task is None:
            return None
        kind = torch.float32 if self.task.kind in ("values", "frames") else torch.int64
        return Criterion(self.task.loss(), torch.empty(self.task.target_shape(self.shape), dtype=kind, device="meta"))


def _meshes(ranks: int, spatial_dims: int) -> Iterator[tuple[str, Mesh]]:
    """One mesh per strategy, as square as possible; a single rank has only one way to work."""
    if ranks == 1:
        yield "data", Mesh(data=1)
        return
    for strategy in STRATEGIES:
        candidates = list(factorisations(ranks, axes_of(strategy, spatial_dims)))
        if candidates:
            yield strategy, Mesh(**min(candidates, key=lambda axes: max(axes.values())))
