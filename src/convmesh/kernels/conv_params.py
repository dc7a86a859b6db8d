"""The arguments of a local convolution."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConvParams:
    """The arguments of one local convolution."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def of_aten(self) -> tuple[object, ...]:
        """As ATen's operators take them, after the tensors."""
        stride, padding, dilation = list(self.stride), list(self.padding), list(self.dilation)
        return stride, padding, dilation, False, [0] * len(stride), self.groups
