"""One tensor of every batch, input or target: its layout, and how this rank's box of a sample is put into place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from convmesh.data.augment import Augment, SampleTransform
from convmesh.data.sources.source import Source
from convmesh.data.tensor_spec import Array, TensorSpec
from convmesh.errors import DataError, UnsupportedError
from convmesh.layout import Box, Layout, Span
from convmesh.runtime import ParallelNet


@dataclass(frozen=True)
class Feed:
    """What a loader knows about one tensor. `shape` is that of an augmented sample, `spec` that of a stored one."""

    name: str
    spec: TensorSpec
    shape: tuple[int, ...]
    read: Callable[[int, Box, Array | None], Array]
    layout_of: Callable[[int], Layout]
    """The layout of a batch of `samples` samples."""
    dtype: torch.dtype
    augment: Augment | None = None
    """None where the augmentation leaves this tensor alone."""
    space: int = 0
    """Dims of space, the last ones."""
    relit: bool = False
    """Whether changes of intensity apply to this tensor."""

    @property
    def host_dtype(self) -> torch.dtype:
        """The type in which values wait on the host: NumPy has no bfloat16."""
        return torch.float32 if self.dtype is torch.bfloat16 else self.dtype

    def transform(self, epoch: int, index: int) -> SampleTransform | None:
        if self.augment is None:
            return None
        return self.augment.of(epoch, index, self.spec.shape[len(self.spec.shape) - self.space :])

    def fill(self, epoch: int, index: int, box: Box, place: Array) -> None:
        """Read a box of an augmented sample into its place in the batch."""
        transform = self.transform(epoch, index)
        if transform is None:
            self.read(index, box, place)
        else:
            self.put(self.read(index, transform.source_box(box), None), transform, place)

    def put(self, values: Array, transform: SampleTransform | None, place: Array) -> None:
        """Write values that were read for a box into their place in the batch, augmented."""
        if transform is None:
            place[...] = values
        else:
            moved = transform.moved(values)
            place[...] = transform.relit(moved) if self.relit else moved


def sample_box(box: Box) -> tuple[Span, Box]:
    """The samples that a box of a batch covers, and the box within each sample."""
    return box.spans[0], Box(box.spans[1:])


def input_feed(source: Source, net: ParallelNet, augment: Augment | None, dtype: torch.dtype | None) -> Feed:
    """The feed of a network's input; refuses samples that the plan was not made for."""
    planned = net.input_layouts()
    if len(planned) != 1:
        raise UnsupportedError(f"a loader feeds networks with one input; this one has {len(planned)}. Cut batches with "
                               "`net.shard_input`.")  # fmt: skip
    shape = source.input.shape if augment is None else augment.shape(source.input.shape)
    if shape != planned[0].shape[1:]:
        raise DataError(
            f"samples of {source} have shape {shape}, but the plan was made for {planned[0].shape[1:]}; make a plan "
            "for these samples, or crop them with `Augment(crop=...)`."
        )
    return Feed(
        "input", source.input, shape, source.read, lambda samples: net.input_layouts(samples)[0],
        dtype or _usual(source.input.dtype, torch.get_default_dtype()), augment, len(shape) - 1, relit=True,
    )  # fmt: skip


def target_feed(source: Source, net: ParallelNet, augment: Augment | None, dtype: torch.dtype | None) -> Feed:
    """The feed of the targets, which move with the inputs if they are per voxel."""
    spec, space = source.target, source.input.shape[1:]
    kind = _usual(spec.dtype, torch.int64)
    plain = Feed(
        "target", spec, spec.shape, source.read_target, lambda samples: net.target_layout((samples, *spec.shape)),
        dtype if dtype is not None and kind.is_floating_point else kind,
    )  # fmt: skip
    if augment is None or len(spec.shape) < len(space):
        return plain
    lead = len(spec.shape) - len(space)
    if spec.shape[lead:] != space:
        raise UnsupportedError(
            f"targets of {source} have shape {spec.shape}, and inputs the space {space}; augmentation needs equal "
            "spaces."
        )
    shape = (*spec.shape[:lead], *augment.shape(source.input.shape)[1:])
    layout_of: Callable[[int], Layout] = lambda samples: net.target_layout((samples, *shape))  # noqa: E731
    return replace(plain, shape=shape, layout_of=layout_of, augment=augment, space=len(space))


def _usual(stored: np.dtype[Any], for_integers: torch.dtype) -> torch.dtype:
    """Floating-point values stay what they are; integers become what the network or its loss computes with."""
    kind: torch.dtype = getattr(torch, stored.name) if stored.kind == "f" else for_integers
    return kind
