"""Gaussian random fields with the power spectrum P(k) = A (k / k₀)ⁿ, from which n and A are to be regressed.

The task of CosmoFlow in miniature: parameters of a cosmology from the distribution of its matter. Targets are the
spectral index and the amplitude, scaled to ±1 over their ranges.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from convmesh.data.generators.sample_generator import SampleGenerator, check_positive, stream
from convmesh.data.tensor_spec import Array, TensorSpec

INDICES = (-3.0, -1.0)
"""Spectral indices n: from large structures to fine ones."""
AMPLITUDES = (0.5, 1.5)
"""Amplitudes √A: the field's strength at the pivot."""
WAVES_PIVOT = 4.0
"""The pivot k₀, in waves along the volume."""
GROWTH = 0.8
"""How much weaker each further channel is: an earlier time, when structure had grown less."""


class Cosmology(SampleGenerator):
    """Volumes of `size`³ with the same field at `channels` times, and two targets."""

    def __init__(self, size: int = 32, samples: int = 512, seed: int = 0, channels: int = 1) -> None:
        check_positive(size=size, samples=samples, channels=channels)
        self.size, self.samples, self.seed, self.channels = size, samples, seed, channels
        self.input = TensorSpec((channels, size, size, size), np.dtype(np.float32))
        self.target = TensorSpec((2,), np.dtype(np.float32))

    def sample(self, index: int) -> tuple[Array, Array]:
        draws = stream(self.seed, index)
        target = draws.uniform(-1.0, 1.0, 2)
        spectral, amplitude = (
            _within(low, high, at) for (low, high), at in zip((INDICES, AMPLITUDES), target, strict=True)
        )
        noise = draws.standard_normal((self.size,) * 3, dtype=np.float32)
        field = self._field(noise, spectral, amplitude)
        growth = (GROWTH ** np.arange(self.channels, dtype=np.float32)).reshape(-1, 1, 1, 1)
        return growth * field, target.astype(np.float32)

    def _field(self, noise: Array, spectral: float, amplitude: float) -> Array:
        import scipy.fft  # not needed by other generators

        waves = _waves(self.size)
        strength = (amplitude * (waves / WAVES_PIVOT) ** (spectral / 2)).astype(np.float32)
        strength[0, 0, 0] = 0.0  # the mean carries no structure
        field: Array = scipy.fft.irfftn(scipy.fft.rfftn(noise) * strength, s=noise.shape)
        return field.astype(np.float32, copy=False)

    def describe(self) -> dict[str, object]:
        return {
            "generator": "cosmology", "size": self.size, "samples": self.samples, "seed": self.seed,
            "channels": self.channels, "target": "spectral index and amplitude, scaled to ±1",
            "spectral_index": INDICES, "amplitude": AMPLITUDES,
        }  # fmt: skip


def _within(low: float, high: float, at: float) -> float:
    """The value at `at`, which is from -1 (`low`) to 1 (`high`)."""
    return low + (high - low) * (at + 1) / 2


@lru_cache(maxsize=2)
def _waves(size: int) -> Any:
    """The wave number of every mode, in waves along the volume; 1 in place of 0."""
    full, half = np.fft.fftfreq(size, 1 / size), np.fft.rfftfreq(size, 1 / size)
    squares = full[:, None, None] ** 2 + full[None, :, None] ** 2 + half[None, None, :] ** 2
    return np.sqrt(np.maximum(squares, 1.0)).astype(np.float32)
