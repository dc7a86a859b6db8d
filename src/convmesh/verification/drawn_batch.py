"""The data of a verification: drawn anew in every process, and the same in all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from convmesh.errors import ShapeError
from convmesh.verification.result import Shapes

Sample = torch.Tensor | Sequence[int] | Sequence[torch.Tensor | Sequence[int]]
"""A tensor or shape of the global batch; a list of them for a network with several inputs."""

DrawTarget = Callable[[tuple[int, ...]], Any]
"""From the shape of the first input's batch to a global target."""


@dataclass(frozen=True)
class DrawnBatch:
    """What both runs train on; `shapes` are those of the inputs."""

    samples: tuple[torch.Tensor | tuple[int, ...], ...]
    shapes: Shapes
    target: Any = None
    steps: int = 3

    def inputs(self) -> list[torch.Tensor]:
        """Values in float64: the corner of the user's sample where it tells something, else normal ones."""
        generator = torch.Generator().manual_seed(1)
        pairs = zip(self.samples, self.shapes, strict=True)
        return [_values(sample, shape, generator) for sample, shape in pairs]

    def targets(self) -> Any:
        """The global target, floats in float64."""
        target = self.target(self.shapes[0]) if callable(self.target) else self.target
        return _double(target) if isinstance(target, torch.Tensor) else target


def cotangent(index: int, output: torch.Tensor | Any) -> torch.Tensor:
    """A random gradient for the output with that index; `output` has a global shape."""
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randn(tuple(output.shape), generator=generator, dtype=torch.float64)


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


def without_data(sample: torch.Tensor | tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of another shape and of the sample's type, floats in float64, that holds nothing."""
    dtype = sample.dtype if isinstance(sample, torch.Tensor) else torch.float64
    return torch.empty(shape, dtype=torch.float64 if dtype.is_floating_point else dtype, device="meta")


def _values(sample: torch.Tensor | tuple[int, ...], shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if isinstance(sample, torch.Tensor) and not sample.is_meta:
        corner = _double(sample.detach()[tuple(slice(extent) for extent in shape)].cpu().clone())
        # A sample of zeros, or of one value, would hide most mistakes.
        if not corner.is_floating_point() or (corner.isfinite().all() and corner.numel() > 1 and corner.std() > 0):
            return corner
    if isinstance(sample, torch.Tensor) and not sample.is_floating_point():
        return torch.zeros(shape, dtype=sample.dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
