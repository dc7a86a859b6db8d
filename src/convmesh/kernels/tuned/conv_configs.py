"""How a convolution's kernels cut their work: what is tried when a shape is tuned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from convmesh.kernels.tuned.conv_shape import ConvShape

LEAST = 16
"""The least extent of a matrix product on tensor cores."""

BYTES_SHARED = 220 << 10
"""Shared memory of a processor of the GPUs at hand, less what programs need besides."""

REGISTERS_OF_SUM = 128
"""Numbers of a running sum that a thread can hold without spilling."""


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """A tile of outputs, the filters and taps of one product, and how the compiler schedules them."""

    rows: int
    columns: int
    filters: int
    taps: int
    warps: int
    stages: int
    walk: int
    """How many tiles below each other one program computes."""
    parts: int = 1
    """Of a weight's gradient: among how many programs the outputs are dealt."""


def forward_configs(shape: ConvShape) -> Iterator[KernelConfig]:
    """Tiles that may suit a convolution."""
    filters = min(128, _cover(shape.filters))
    for rows, columns in _tiles(shape, (64, 128, 256)):
        for taps in _tap_blocks(shape, 256):
            is_one_product = shape.taps <= taps
            for warps in _warps(rows * columns * filters):
                for stages in (2, 4) if is_one_product else (3,):
                    walk = 16 if is_one_product else 1
                    if stages * taps * (rows * columns + filters) * 2 <= BYTES_SHARED:
                        yield KernelConfig(rows, columns, filters, taps, warps, stages, walk)


def weight_configs(shape: ConvShape, processors: int) -> Iterator[KernelConfig]:
    """Tiles that may suit the gradient of a weight, dealt so that `processors` of a GPU have a few programs each."""
    filters = min(128, _cover(shape.filters))
    for taps in _tap_blocks(shape, 256):
        programs = -(-shape.taps // taps) * -(-shape.filters // filters)
        for rows, columns in _tiles(shape, (64, 128)):
            for warps in _warps(taps * filters):
                stages = 3 if 3 * rows * columns * (taps + filters) * 2 <= BYTES_SHARED // 2 else 2
                for each in (2, 4):
                    parts = max(1, processors * each // programs)
                    yield KernelConfig(rows, columns, filters, taps, warps, stages, 32, parts)


def _warps(sums: int) -> list[int]:
    """Of 4 and 8 warps those that can hold a running sum, and whose threads have work."""
    return [warps for warps in (4, 8) if sums <= REGISTERS_OF_SUM * 32 * warps and (warps == 4 or sums >= 8 * 32 * warps)]


def _tiles(shape: ConvShape, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Rows and columns of tiles of some sizes: as wide as the output allows."""
    height, width = shape.out[1:]
    for size in sizes:
        columns = min(size, _cover(width))
        if size // columns <= _cover(height):
            yield size // columns, columns


def _tap_blocks(shape: ConvShape, most: int = 128) -> list[int]:
    """Numbers of taps for one product: some that waste few, and no more than there are."""
    sizes = [size for size in (16, 32, 64, 128, 256) if size <= min(most, _cover(shape.taps))]
    wasted = {size: -(-shape.taps // size) * size / shape.taps for size in sizes}
    return [size for size in sizes if size >= 32 or size == sizes[-1] if wasted[size] <= 1.35 * min(wasted.values())]


def _cover(count: int) -> int:
    """The least power of two that is not below `count`, nor below what tensor cores take."""
    return max(LEAST, 1 << (count - 1).bit_length())
