"""Small volumes with targets of every kind, in files, and the network that reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh.data.tensor_spec import Array

SHAPE = (2, 12, 10, 9)
SAMPLES = 11


def volumes(samples: int = SAMPLES, shape: tuple[int, ...] = SHAPE) -> Array:
    return np.random.default_rng(0).standard_normal((samples, *shape)).astype(np.float32)


def voxel_labels(samples: int = SAMPLES, space: tuple[int, ...] = SHAPE[1:]) -> Array:
    return np.random.default_rng(1).integers(0, 3, (samples, *space)).astype(np.uint8)


def write_hdf5(path: Path, inputs: Array, targets: Array, **options: Any) -> Path:
    import h5py

    with h5py.File(path, "w") as file:
        file.create_dataset("inputs", data=inputs, **options)
        file.create_dataset("targets", data=targets)
    return path


def segmenter(shape: tuple[int, ...], batch: int, mesh: cm.Mesh, strategy: str) -> cm.ParallelNet:
    """A network with an output per voxel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(shape[0], 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 1))
    return cm.parallelize(model, cm.plan(model, (batch, *shape), mesh, strategy), loss=F.cross_entropy)


def classifier(shape: tuple[int, ...], batch: int, mesh: cm.Mesh, strategy: str) -> cm.ParallelNet:
    """A network with one output per sample."""
    torch.manual_seed(0)
    pooled = nn.Sequential(nn.Conv3d(shape[0], 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten())
    model = nn.Sequential(pooled, nn.Linear(4, 3))
    return cm.parallelize(model, cm.plan(model, (batch, *shape), mesh, strategy), loss=F.cross_entropy)
