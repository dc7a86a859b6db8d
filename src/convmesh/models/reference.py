"""A reference network as a value: its factory, sample shape, task and size."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from convmesh.models.load import build, import_factory
from convmesh.models.task import Task

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One published network; `sample` is the shape of one sample, `parameters` their published number per `source`."""

    name: str
    module: str
    factory: str
    sample: tuple[int, ...]
    task: Task
    parameters: int
    source: str
    small_sample: tuple[int, ...]
    small_sizes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    small_batch: int = 4
    small_rate: float = 0.01

    @property
    def path(self) -> str:
        return f"{self.module}:{self.factory}"

    def create(self, **sizes: Any) -> nn.Module:
        """The network as published, except for the given `sizes`."""
        return build(self.name, import_factory(self.path), sizes)

    def sizes_for(self, sample: Sequence[int]) -> dict[str, int]:
        """The sizes that depend on a sample's shape: the extent of an input cube, where dense layers depend on it."""
        takes_extent = "extent" in inspect.signature(import_factory(self.path)).parameters
        extents = {*sample[1:]}
        return {"extent": extents.pop()} if takes_extent and len(extents) == 1 else {}

    def small(self) -> Small:
        """The same topology, narrow and with small samples: trains in moments on one core."""
        counted = ("classes", "outputs", "vocabulary", "predicted")
        counts = (self.small_sizes[name] for name in counted if name in self.small_sizes)
        count = next(counts, self.task.count)
        shape = (self.small_batch, *self.small_sample)
        return Small(self, dict(self.small_sizes), shape, replace(self.task, count=count), self.small_rate)


@dataclass(frozen=True, slots=True)
class Small:
    """A small version of a reference network for tests of exactness; `shape` is that of a batch.

    Dropout is off: torch and split operators draw different masks. At the learning rate `rate` rounding errors do not
    grow from step to step; at ten times that rate they may, as in every deep network with batch norm.
    """

    reference: Reference
    sizes: Mapping[str, Any] = field(hash=False)
    shape: tuple[int, ...]
    task: Task
    rate: float

    def create(self, **sizes: Any) -> nn.Module:
        return self.reference.create(**{**self.sizes, **sizes})

    def draw_input(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """Standard normal values, or words, as float64."""
        import torch

        if self.task.kind == "class per word":  # half a word more, so that a little noise does not change the word
            return torch.randint(0, self.task.count, self.shape, generator=generator).double() + 0.5
        return torch.randn(self.shape, generator=generator, dtype=torch.float64)

    def draw_target(self, generator: torch.Generator | None = None) -> torch.Tensor:
        return self.task.draw_target(self.shape, generator)
