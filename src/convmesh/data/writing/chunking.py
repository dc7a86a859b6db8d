"""Chunks that ranks can read in part: whole channels, 2 to 16 MB where samples are large enough."""

from __future__ import annotations

import math

from convmesh.data.tensor_spec import TensorSpec

BYTES_CHUNK = 8 * 2**20
"""The plateau of HDF5's and Zarr's reading speed is 2 to 16 MB."""
BYTES_SMALL = 4096
"""Up to this size, samples lie in rows of one block: classes, values."""
SMALLEST_EXTENT = 8
"""Dims are not cut into chunks below this extent."""


def is_small(spec: TensorSpec) -> bool:
    return spec.bytes_sample <= BYTES_SMALL


def slab_chunks(spec: TensorSpec) -> tuple[int, ...]:
    """Chunks of one sample whose values can be read in any part: slabs of the first dim of space."""
    chunk = list(spec.shape)
    for dim in range(_lead(spec), len(chunk)):
        while chunk[dim] > 1 and _bytes(chunk, spec) > BYTES_CHUNK:
            chunk[dim] = -(-chunk[dim] // 2)
    return tuple(chunk)


def block_chunks(spec: TensorSpec) -> tuple[int, ...]:
    """Chunks of one sample that are read whole: blocks, so that ranks cut along any dims of space read only theirs.

    The first dim of space is in at least four, the others in at least two pieces.
    """
    lead = _lead(spec)
    chunk = list(spec.shape)
    for dim in range(lead, len(chunk)):
        for _ in range(2 if dim == lead else 1):
            _halve(chunk, dim)
    while _bytes(chunk, spec) > BYTES_CHUNK and max(chunk[lead:]) > SMALLEST_EXTENT:
        _halve(chunk, lead + chunk[lead:].index(max(chunk[lead:])))
    return tuple(chunk)


def _halve(chunk: list[int], dim: int) -> None:
    if chunk[dim] >= 2 * SMALLEST_EXTENT:
        chunk[dim] = -(-chunk[dim] // 2)


def _lead(spec: TensorSpec) -> int:
    """Dims before space: inputs have channels; a target per voxel of a volume or an image may have none."""
    return 1 if len(spec.shape) > 3 or (len(spec.shape) == 3 and spec.shape[0] <= 4) else 0


def _bytes(chunk: list[int], spec: TensorSpec) -> int:
    return math.prod(chunk) * spec.dtype.itemsize
