"""How convolutions over groups of outputs cut their work: the configurations tried in tuning, likely ones first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from convmesh.kernels.tuned.conv_configs import LEAST, REGISTERS_OF_SUM, KernelConfig, cover
from convmesh.kernels.tuned.conv_shape import ConvShape, Three

LEAST_RUN_BYTES = 8
"""For the neighbouring numbers that one thread loads: below that, copying ahead to shared memory does not pay."""
MOST_COLUMNS = 128
BYTES_SHARED = 227 * 1024
CACHE_BYTES_PER_SECOND, FLOPS_PER_SECOND = 6e12, 6e14
"""An H200's second-level cache and tensor cores; they only order what is tried."""

LEAST_TILES, ENOUGH_TILES = 100, 400
"""For a GPU's processors: smaller tiles load weights more often, and are tried only if there are few larger ones."""


def grouped_configs(shape: ConvShape, most: int = 4) -> Iterator[KernelConfig]:
    """Groups and tiles that may suit a convolution in 16 bits: the `most` likely groups, scheduled in several ways."""
    if shape.channels * 2 < LEAST_RUN_BYTES:
        return
    groups = sorted(_groups(shape), key=lambda group: (seconds(shape, group, 256), group[2] == 1, -group[0]))[:most]
    for group, size in product(groups, (64, 128, 256)):
        if tiles(shape, group, size) < LEAST_TILES or (size == 64 and tiles(shape, group, 128) > ENOUGH_TILES):
            continue
        columns, across = cover(prod(group) * shape.filters), min(size, cover(-(-shape.out[2] // group[2])))
        for numbers, warps in product(_pieces(shape, group), _warps(size, columns)):
            for stages in _stages((size + columns) * numbers * 2, numbers):
                yield KernelConfig(
                    size // across, across, columns, numbers, warps, stages, 1, 1,
                    deep=group[0], high=group[1], wide=group[2],
                )  # fmt: skip


def tiles(shape: ConvShape, group: Three, size: int) -> float:
    return shape.samples * prod(-(-n // r) for n, r in zip(shape.out, group, strict=True)) / size


def seconds(shape: ConvShape, group: Three, size: int) -> float:
    """What a product of such tiles may take: loads of windows and weights from the second-level cache; arithmetic."""
    columns = cover(prod(group) * shape.filters)
    numbers = tiles(shape, group, size) * prod(shape.window_of(group)) * shape.channels
    loaded, flops = numbers * 2 * (size + columns), numbers * 2 * size * columns
    return loaded / CACHE_BYTES_PER_SECOND + flops / FLOPS_PER_SECOND


def _groups(shape: ConvShape) -> Iterator[Three]:
    """Groups that fill at least half of the columns of a product."""
    for deep, high, wide in product((1, 2, 4), (1, 2, 4), (1, 2, 4, 8)):
        used = deep * high * wide * shape.filters
        fits = deep <= shape.out[0] and high <= shape.out[1] and wide <= shape.out[2]
        if fits and used <= MOST_COLUMNS and (used >= LEAST or deep * high * wide >= LEAST):
            yield deep, high, wide


def _pieces(shape: ConvShape, group: Three) -> list[int]:
    """Numbers of a line that are multiplied at a time: the two largest of those that waste least of a line."""
    run = shape.window_of(group)[2] * shape.channels
    sizes = [size for size in (64, 32, 16) if -(-run // size) * size <= 1.34 * run]
    least = min((-(-run // size) * size for size in sizes), default=0)
    return [size for size in sizes if -(-run // size) * size == least][:2] or [LEAST]


def _stages(bytes_each: int, numbers: int) -> list[int]:
    """How many pieces are under way: four, or three if two programs then fit on a processor; short ones also one."""
    return [3 if 3 * bytes_each <= BYTES_SHARED // 2 < 4 * bytes_each else 4, *([1] if numbers == LEAST else [])]


def _warps(size: int, columns: int) -> list[int]:
    """Warps that can hold a running sum: four for 64 to 128 rows."""
    fitting = [warps for warps in (4, 8) if size * columns <= REGISTERS_OF_SUM * 32 * warps]
    return [warps for warps in fitting if 64 <= size * 4 // warps <= 128]
