"""The data of a verification: each process draws it, and all draw the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from convmesh.errors import ShapeError
from convmesh.graph.checking.drawn_values import drawn_input
from convmesh.verification.result import Shapes

Sample = torch.Tensor | Sequence[int] | Sequence[torch.Tensor | Sequence[int]]
"""A tensor or shape of the global batch; a list of them for a network with several inputs."""

DrawTarget = Callable[[tuple[int, ...]], Any]
"""From the shape of the first input's batch to a global target."""


@dataclass(frozen=True)
class DrawnBatch:
    """The batch that both runs train on, with inputs of `shapes`."""

    samples: tuple[torch.Tensor | tuple[int, ...], ...]
    shapes: Shapes
    target: Any = None
    steps: int = 3

    def inputs(self) -> list[torch.Tensor]:
        """Values in float64: a corner of the user's sample if it has varied data, else normal values."""
        generator = torch.Generator().manual_seed(1)
        pairs = zip(self.samples, self.shapes, strict=True)
        return [drawn_input(sample, shape, _dtype(sample), generator) for sample, shape in pairs]

    def targets(self) -> Any:
        """The global target, floats in float64."""
        target = self.target(self.shapes[0]) if callable(self.target) else self.target
        return _double(target) if isinstance(target, torch.Tensor) else target


def as_samples(sample: Sample) -> list[torch.Tensor | tuple[int, ...]]:
    """One sample or several, each a tensor or a shape."""
    if isinstance(sample, torch.Tensor):
        return [sample]
    given: Sequence[Any] = sample if isinstance(sample, Sequence) else [sample]
    if given and all(isinstance(extent, int) for extent in given):
        return [tuple(given)]
    return [x if isinstance(x, torch.Tensor) else _shape(x) for x in given]


def _shape(given: Any) -> tuple[int, ...]:
    if isinstance(given, Sequence) and given and all(isinstance(extent, int) for extent in given):
        return tuple(given)
    raise ShapeError(f"`sample` has {given!r:.80}; it must be a tensor or a shape of whole numbers, or a list of them.")


def without_data(
    sample: torch.Tensor | tuple[int, ...], shape: tuple[int, ...], floats: torch.dtype = torch.float64
) -> torch.Tensor:
    """A tensor of `shape` and of the sample's type, floats as `floats`, on the meta device."""
    blank: torch.Tensor = in_precision(torch.empty(shape, dtype=_dtype(sample), device="meta"), floats)
    return blank


def in_precision(value: Any, floats: torch.dtype) -> Any:
    """A tensor in another precision, if it has floats."""
    return value.to(floats) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _dtype(sample: torch.Tensor | tuple[int, ...]) -> torch.dtype:
    """Floats are computed in float64."""
    given = sample.dtype if isinstance(sample, torch.Tensor) else torch.float64
    return torch.float64 if given.is_floating_point else given


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
