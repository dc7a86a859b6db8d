"""Seconds of an operator that was not timed on a device: arithmetic, memory, tiles and the launch floor.

Efficiencies are those of well-tuned libraries, relative to the fraction of peak that the system states for large
convolutions. They are not fitted to any run: narrow products fill a fraction of a tile, and the last wave of tiles
leaves processors idle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from convmesh.oracle.pricing.assumptions import Assumptions
from convmesh.plans.steps import Shape, Work, bytes_each
from convmesh.system import Device

TILE = 128
"""Rows and columns of the product that one processor of a GPU computes at a time."""
INNER = 64
"""Inner length at which a tile reaches half of its arithmetic rate."""
PASSES: Mapping[str, float] = {
    "native_batch_norm": 1.5, "native_batch_norm_backward": 1.4, "native_group_norm": 1.5,
    "native_group_norm_backward": 1.4, "native_layer_norm_backward": 1.2,
}  # fmt: skip
"""Operators that read an operand twice, first for its statistics: bytes moved over bytes of operands."""
KERNELS: Mapping[str, int] = {
    "convolution_backward": 2, "native_batch_norm_backward": 2, "addmm": 1, "fused_moments": 2, "fused_sums": 2,
}  # fmt: skip
"""Fewest kernels that one call launches; 1 unless listed."""
FUSED = "fused_"
"""Prefix of the names of a compiler's kernels."""
GRAPHED = 0.4
"""A guess: kernels of a CUDA graph follow each other in 2 us where launches take 5."""


@dataclass(frozen=True, slots=True)
class Product:
    """A convolution or matrix product as rows × columns with an inner length, in independent groups."""

    rows: int
    columns: int
    inner: int
    groups: int = 1

    @property
    def fill(self) -> float:
        """Share of the tiles' arithmetic that is useful."""
        rows, columns = (size / (_tile(size) * math.ceil(size / _tile(size))) for size in (self.rows, self.columns))
        return rows * columns * self.inner / (self.inner + INNER)

    @property
    def tiles(self) -> int:
        each = (math.ceil(size / _tile(size)) for size in (self.rows, self.columns))
        return self.groups * math.prod(each)


def _tile(size: int) -> int:
    """Libraries have narrower tiles for narrow products, down to an eighth."""
    return max(TILE // 8, min(TILE, 1 << max(0, (size - 1).bit_length())))


def product_of(work: Work) -> Product | None:
    """The product that an operator computes; None if it computes none."""
    if not work.flops or len(work.inputs) < 2 or not work.outputs:
        return None
    if work.op.startswith("convolution"):
        return _convolution(work)
    left, right = work.inputs[-2:]
    return Product(left[-2], right[-1], left[-1], math.prod(left[:-2])) if min(len(left), len(right)) >= 2 else None


def _convolution(work: Work) -> Product | None:
    backward = work.op == "convolution_backward"
    shapes: tuple[Shape, ...] = work.inputs
    image, weight = (shapes[0], shapes[2]) if backward else (work.outputs[0], shapes[1])
    if len(image) < 3 or len(weight) != len(image):
        return None
    rows = image[0] * math.prod(image[2:])
    groups = max(1, image[1] // weight[0]) if weight[0] else 1
    source = shapes[1][1] if backward else shapes[0][1]
    groups = max(groups, source // weight[1]) if weight[1] else groups
    return Product(rows, max(1, weight[0] // groups), weight[1] * math.prod(weight[2:]), groups)


class Roofline:
    """Seconds of an operator from a device's figures."""

    def __init__(self, device: Device, assumptions: Assumptions) -> None:
        self._device, self._assumed = device, assumptions
        self._memory_rate = float(device.bytes_per_second_memory) * float(device.fraction_memory)
        self._launch = float(device.seconds_launch)
        self._rates: dict[tuple[str, bool], tuple[float, float]] = {}

    def seconds(self, work: Work) -> float:
        return max(self.arithmetic(work), self.memory(work), self.floor(work))

    def floor(self, work: Work) -> float:
        share = GRAPHED if work.op.startswith(FUSED) else 1.0
        return self._launch * share * KERNELS.get(work.op, 1)

    def memory(self, work: Work) -> float:
        return work.bytes_moved * PASSES.get(work.op, 1.0) / self._memory_rate

    def arithmetic(self, work: Work) -> float:
        """At the peak rate of the operator's units, less the waste of tiles and waves."""
        if not work.flops:
            return 0.0
        if work.op.startswith(FUSED):
            peak, fraction = self._rate("float32", tensor=False)
            return work.flops / (peak * fraction)
        product = product_of(work)
        is_thin = product is not None and product.groups > 1 and min(product.columns, product.inner) < TILE // 8
        peak, fraction = self._rate(self.number_format(work), tensor=not is_thin)
        used = 1.0 if product is None or is_thin else product.fill * self._waves(product)
        return work.flops / (peak * fraction * max(used, 1 / TILE))

    def _waves(self, product: Product) -> float:
        """Share of the processors' time in which they have a tile; with few tiles, the inner loop is split."""
        processors = int(self._device.processors)
        tiles = product.tiles
        if tiles < processors:
            tiles *= max(1, min(processors // tiles, product.inner // TILE))
        return tiles / (processors * math.ceil(tiles / processors))

    def _rate(self, name: str, tensor: bool) -> tuple[float, float]:
        """Peak rate and reachable fraction; grouped convolutions with few channels do not use tensor cores."""
        if (name, tensor) not in self._rates:
            self._rates[name, tensor] = self._figures(name, tensor)
        return self._rates[name, tensor]

    def _figures(self, name: str, tensor: bool) -> tuple[float, float]:
        device = self._device
        if tensor and name in device.tensor_flops_per_second:
            return float(device.peak(name)), float(device.fraction_tensor or device.fraction_vector)
        known = name if name in device.flops_per_second else "float32"
        return float(device.peak(known, tensor=False)), float(device.fraction_vector)

    def number_format(self, work: Work) -> str:
        """The number format in which the device computes an operator."""
        wanted = self._assumed.tf32 if self._assumed.tf32 is not None else work.op.startswith("convolution")
        if work.dtype == "float32" and wanted and "tf32" in self._device.tensor_flops_per_second:
            return "tf32"
        known = (*self._device.flops_per_second, *self._device.tensor_flops_per_second)
        return work.dtype if work.dtype in known else "float32"

    def update(self, elements: int, dtype: str, states: int) -> float:
        """Seconds of the optimiser: parameters, gradients and states are read, parameters and states written."""
        moved = elements * bytes_each(dtype) * (3 + 2 * states)
        return max(self.memory(Work("update", (), (), dtype, 0, moved)), float(self._device.seconds_launch))
