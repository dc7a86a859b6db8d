"""What a generator provides: samples by index, and their shapes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache

import numpy as np

from convmesh.data.sources.source import ReadCounters, Source
from convmesh.data.tensor_spec import Array, TensorSpec
from convmesh.errors import DataError
from convmesh.layout import Box

_KEPT = 16
"""Samples to keep: a sample's input and target are requested separately."""


class SampleGenerator(ABC):
    """Makes sample `index` from a seed: equal on every machine, in any order, by any number of processes."""

    input: TensorSpec
    target: TensorSpec
    samples: int
    """How many samples there are, or are requested."""

    @abstractmethod
    def sample(self, index: int) -> tuple[Array, Array]:
        """Input and target."""

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """The settings that determine the samples, for the file they are written to."""


def stream(seed: int, index: int) -> np.random.Generator:
    """Random numbers of one sample."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, index])))


def check_positive(**sizes: int) -> None:
    """Refuse sizes below 1, by name."""
    for name, value in sizes.items():
        if value < 1:
            raise DataError(f"`{name}` (={value}) must be at least 1.")


class GeneratedSource(Source):
    """A generator's samples without a file; every rank makes whole samples, so write large ones to a file."""

    def __init__(self, generator: SampleGenerator) -> None:
        self.generator = generator
        self.input, self.target = generator.input, generator.target
        self.counters = ReadCounters()
        self._sample = lru_cache(maxsize=_KEPT)(generator.sample)

    def __reduce__(self) -> tuple[type[GeneratedSource], tuple[SampleGenerator]]:
        return GeneratedSource, (self.generator,)

    def __len__(self) -> int:
        return self.generator.samples

    def __str__(self) -> str:
        return type(self.generator).__name__.lower()

    def _input_into(self, index: int, box: Box, out: Array) -> int:
        out[...] = self._sample(index)[0][box.slices()]
        return self.input.bytes_sample

    def _target_into(self, index: int, box: Box, out: Array) -> int:
        out[...] = self._sample(index)[1][box.slices()]
        return self.target.bytes_sample
