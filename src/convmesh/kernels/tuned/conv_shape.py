"""A local convolution as numbers: what decides which kernel is fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Self

Three = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ConvShape:
    """A convolution of volumes without groups. Images are volumes of depth 1."""

    samples: int
    channels: int
    filters: int
    extents: Three
    """Of the input."""
    kernel: Three
    stride: Three
    padding: Three
    dilation: Three

    @classmethod
    def of(
        cls,
        x: Sequence[int],
        weight: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> Self:
        """From the shapes of input and weight, with two or three dims of space."""
        return cls(
            x[0],
            x[1],
            weight[0],
            _three(x[2:], 1),
            _three(weight[2:], 1),
            _three(stride, 1),
            _three(padding, 0),
            _three(dilation, 1),
        )

    @property
    def out(self) -> Three:
        """Extents of the output."""
        first, second, third = (
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(self.extents, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        )
        return first, second, third

    @property
    def taps(self) -> int:
        """The number of products that sum to one output of one filter."""
        return self.channels * prod(self.kernel)

    @property
    def flops(self) -> int:
        return 2 * self.samples * prod(self.out) * self.taps * self.filters

    def bytes_moved(self, itemsize: int) -> int:
        """Input, weight and output, each once."""
        inputs = self.samples * self.channels * prod(self.extents)
        outputs = self.samples * self.filters * prod(self.out)
        return itemsize * (inputs + outputs + self.taps * self.filters)

    def window_of(self, group: Three) -> Three:
        """Extents of the input that a group of neighbouring outputs reads."""
        first, second, third = (
            (r - 1) * s + (k - 1) * d + 1
            for r, k, s, d in zip(group, self.kernel, self.stride, self.dilation, strict=True)
        )
        return first, second, third

    def mirrored(self) -> ConvShape | None:
        """The convolution of the output's gradient that gives the input's; None if it is not a plain convolution."""
        padding = tuple(d * (k - 1) - p for k, p, d in zip(self.kernel, self.padding, self.dilation, strict=True))
        if self.stride != (1, 1, 1) or min(padding) < 0:
            return None
        channels, filters = self.filters, self.channels
        mirror = replace(self, channels=channels, filters=filters, extents=self.out, padding=_three(padding, 0))
        return mirror if mirror.out == self.extents else None

    def __str__(self) -> str:
        """As tables name it, e.g. `1x4x128x128x128 32 k3x3x3 s1x1x1 p1x1x1 d1x1x1`."""
        sizes = "x".join(map(str, (self.samples, self.channels, *self.extents)))
        rest = zip("kspd", (self.kernel, self.stride, self.padding, self.dilation), strict=True)
        return " ".join([sizes, str(self.filters), *(letter + "x".join(map(str, three)) for letter, three in rest)])

    @staticmethod
    def parse(text: str) -> ConvShape:
        """The inverse of `str`."""
        sizes, filters, *rest = text.split()
        samples, channels, *extents = _numbers(sizes)
        kernel, stride, padding, dilation = (_three(_numbers(word[1:]), 1) for word in rest)
        return ConvShape(samples, channels, int(filters), _three(extents, 1), kernel, stride, padding, dilation)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split("x")]


def _three(values: Sequence[int], missing: int) -> Three:
    first, second, third = [missing] * (3 - len(values)) + [int(v) for v in values]
    return first, second, third
