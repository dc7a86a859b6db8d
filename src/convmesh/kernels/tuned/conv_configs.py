"""How a convolution's kernels cut their work: the configurations tried when a shape is tuned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from convmesh.kernels.tuned.conv_shape import ConvShape, Three

LEAST = 16
"""The least extent of a matrix product on tensor cores."""

LOADS = ((0, 1), (1, 3))
"""Ways to load inputs, each with a suitable number of tiles under way."""

REGISTERS_OF_SUM = 128
"""Numbers of a running sum that a thread can hold without spilling."""


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """A tile of outputs, the filters and taps of one product, and how the compiler schedules them.

    If outputs are grouped, a tile consists of groups, `filters` counts the columns of the product (outputs of a group
    x filters), and `taps` the numbers of a line of the group's window that are multiplied at a time.
    """

    rows: int
    columns: int
    filters: int
    taps: int
    warps: int
    stages: int
    walk: int
    """How many tiles, one below the other, a program computes."""
    flat: int
    """Whether neighbouring threads read the taps of one output (1) or the same tap of neighbouring outputs (0)."""
    parts: int = 1
    """For a weight's gradient: the number of programs that share the outputs."""
    swapped: int = 0
    """For a weight's gradient: whether windows are taken from the output's gradient (1) or from the input (0)."""
    deep: int = 0
    """The depth of a group of outputs, as `high` and `wide` are its height and width; 0: no groups."""
    high: int = 0
    wide: int = 0

    @property
    def group(self) -> Three:
        return self.deep, self.high, self.wide

    @property
    def is_grouped(self) -> bool:
        return self.wide > 0

    @property
    def width(self) -> int:
        """Columns of outputs that a tile covers."""
        return self.columns * max(1, self.wide)


def forward_configs(shape: ConvShape) -> Iterator[KernelConfig]:
    """Tiles that may suit a convolution."""
    filters = min(128, cover(shape.filters))
    for rows, columns in _tiles(shape, (64, 128, 256)):
        for taps in _tap_blocks(shape, 128 if shape.channels > 8 else 256):
            walk = 16 if prod(shape.kernel) <= taps else 1
            for warps in _warps(rows * columns * filters):
                for flat, stages in LOADS:
                    yield KernelConfig(rows, columns, filters, taps, warps, stages, walk, flat)


def weight_configs(shape: ConvShape, processors: int) -> Iterator[KernelConfig]:
    """Tiles that may suit a weight's gradient, with a few programs for each of a GPU's `processors`."""
    filters = min(128, cover(shape.filters))
    for taps in _tap_blocks(shape, 256):
        programs = -(-prod(shape.kernel) // taps) * -(-shape.filters // filters)
        parts = max(1, processors * 4 // programs)
        for rows, columns in _tiles(shape, (64, 128)):
            for warps in _warps(taps * _padded(shape.channels) * filters):
                for flat, stages in LOADS:
                    yield KernelConfig(rows, columns, filters, taps, warps, stages, 32, flat, parts)


def _warps(sums: int) -> list[int]:
    """Those of 4 and 8 warps that can hold a running sum, and whose threads have work."""
    return [
        warps for warps in (4, 8) if sums <= REGISTERS_OF_SUM * 32 * warps and (warps == 4 or sums >= 8 * 32 * warps)
    ]


def _tiles(shape: ConvShape, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Rows and columns of tiles of these sizes: as wide as the output allows."""
    height, width = shape.out[1:]
    for size in sizes:
        columns = min(size, cover(width))
        if size // columns <= cover(height):
            yield size // columns, columns


def _tap_blocks(shape: ConvShape, most: int) -> list[int]:
    """Numbers of taps for one product of at most `most` columns: some that waste few, and no more than there are."""
    taps, channels = prod(shape.kernel), _padded(shape.channels)
    sizes = [1 << n for n in range(10) if LEAST <= channels << n <= max(most, channels) and 1 << n < 2 * taps]
    if not sizes:
        return [max(1, LEAST // channels)]
    wasted = {size: -(-taps // size) * size for size in sizes[-3:]}
    return [size for size, used in wasted.items() if used <= 1.35 * min(wasted.values())][-2:]


def _padded(channels: int) -> int:
    """Channels as kernels load them: rounded up to a power of two."""
    return 1 << (channels - 1).bit_length()


def cover(count: int) -> int:
    """The least power of two that is at least `count`, and at least what tensor cores take."""
    return max(LEAST, 1 << (count - 1).bit_length())
