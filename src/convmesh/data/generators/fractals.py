"""Volumes of fractals to be classified voxel by voxel: the task of LLNL's ScaFFold.

A kind of fractal is an iterated function system: a few affine contractions, whose attractor the chaos game draws
(Barnsley, "Fractals everywhere", 1988). Volumes hold several fractals of different kinds, at random places, sizes and
brightness, in noise. Class 0 is what no fractal covers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from convmesh.data.generators.sample_generator import SampleGenerator, check_positive, stream
from convmesh.data.tensor_spec import Array, TensorSpec

MAPS = 6
"""Contractions of a kind."""
NOISE = 0.1
POINTS_PER_VOXEL = 6.0
"""Points drawn per voxel of a plane as large as the fractal: dense enough to fill its voxels."""
STEPS_BEFORE = 24
"""Steps of the chaos game until a point is on the attractor."""


class Fractals(SampleGenerator):
    """Volumes of `size`³ with `fractals` fractals of `classes - 1` kinds."""

    def __init__(
        self, size: int = 64, samples: int = 64, seed: int = 0, classes: int = 3, fractals: int = 4, kinds_seed: int = 0
    ) -> None:
        check_positive(size=size, samples=samples, classes=classes - 1, fractals=fractals)
        self.size, self.samples, self.seed, self.classes, self.fractals = size, samples, seed, classes, fractals
        self.kinds_seed = kinds_seed
        self.input = TensorSpec((1, size, size, size), np.dtype(np.float32))
        self.target = TensorSpec((size, size, size), np.dtype(np.uint8))

    def sample(self, index: int) -> tuple[Array, Array]:
        draws = stream(self.seed, index)
        volume = np.float32(NOISE) * draws.standard_normal((self.size,) * 3, dtype=np.float32)
        labels: Array = np.zeros((self.size,) * 3, np.uint8)
        for _ in range(self.fractals):
            kind = int(draws.integers(1, self.classes))
            voxels = self._voxels(draws, kind)
            free = labels[voxels] == 0
            voxels = tuple(axis[free] for axis in voxels)
            labels[voxels] = kind
            volume[voxels] += np.float32(draws.uniform(0.7, 1.3)) * brightness(kind, self.classes)
        return volume[None], labels

    def _voxels(self, draws: np.random.Generator, kind: int) -> tuple[Array, ...]:
        """The voxels of one fractal, each once."""
        extent = max(2, int(self.size * draws.uniform(0.35, 0.6)))
        corner = draws.integers(0, self.size - extent + 1, 3)
        points = attractor(draws, contractions(self.kinds_seed, kind), int(POINTS_PER_VOXEL * extent**2))
        places = np.minimum((points * extent).astype(np.int64), extent - 1) + corner
        flat = np.unique(np.ravel_multi_index(tuple(places.T), (self.size,) * 3))
        return np.unravel_index(flat, (self.size,) * 3)

    def describe(self) -> dict[str, object]:
        return {
            "generator": "fractals", "size": self.size, "samples": self.samples, "seed": self.seed,
            "classes": self.classes, "fractals": self.fractals, "kinds_seed": self.kinds_seed,
        }  # fmt: skip


def brightness(kind: int, classes: int) -> np.float32:
    """The usual brightness of a kind; single fractals deviate by up to 30 %, so that shape matters too."""
    return np.float32(0.5 + 1.5 * kind / (classes - 1))


@lru_cache(maxsize=64)
def contractions(seed: int, kind: int) -> tuple[Any, Any]:
    """The matrices and offsets of a kind's maps; kinds differ in how strongly they contract, and so in density."""
    draws = stream(seed, kind)
    turned = np.linalg.qr(draws.standard_normal((MAPS, 3, 3)))[0]
    scales = draws.uniform(0.35, 0.6, (MAPS, 1, 3))
    return turned * scales, draws.uniform(-1.0, 1.0, (MAPS, 3))


def attractor(draws: np.random.Generator, maps: tuple[Any, Any], count: int) -> Array:
    """Points of the attractor within the unit cube, by the chaos game of many points at once."""
    matrices, offsets = maps
    points = draws.uniform(-1.0, 1.0, (count, 3))
    for _ in range(STEPS_BEFORE):
        chosen = draws.integers(0, len(matrices), count)
        points = np.einsum("nij,nj->ni", matrices[chosen], points) + offsets[chosen]
    low, high = points.min(axis=0), points.max(axis=0)
    scaled: Array = (points - low) / (high - low).max()
    return scaled
