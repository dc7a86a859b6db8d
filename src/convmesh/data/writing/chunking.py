"""Chunks of 2 to 16 MB, consecutive along the depth of a sample.

They are not compressed, so ranks cut along height or width read only their rows of a chunk.
"""

from __future__ import annotations

import math

from convmesh.data.tensor_spec import TensorSpec

BYTES_CHUNK = 8 * 2**20
"""The plateau of HDF5's and Zarr's reading speed is 2 to 16 MB."""
BYTES_SMALL = 4096
"""Samples up to this size are stored as rows of one block: classes, values."""


def is_small(spec: TensorSpec) -> bool:
    return spec.bytes_sample <= BYTES_SMALL


def slab_chunks(spec: TensorSpec) -> tuple[int, ...]:
    """The chunk shape of one sample: slabs of the first dim of space, with whole channels."""
    chunk = list(spec.shape)
    for dim in range(_lead(spec), len(chunk)):
        while chunk[dim] > 1 and _bytes(chunk, spec) > BYTES_CHUNK:
            chunk[dim] = -(-chunk[dim] // 2)
    return tuple(chunk)


def _lead(spec: TensorSpec) -> int:
    """Dims before space: inputs have channels; a per-voxel target of a volume or an image may have none."""
    return 1 if len(spec.shape) > 3 or (len(spec.shape) == 3 and spec.shape[0] <= 4) else 0


def _bytes(chunk: list[int], spec: TensorSpec) -> int:
    return math.prod(chunk) * spec.dtype.itemsize
