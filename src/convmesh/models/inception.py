"""Inception-v3: Szegedy, Vanhoucke, Ioffe, Shlens and Wojna, "Rethinking the Inception architecture", 2016, table 1.

| stage | output of 299×299 |
| --- | --- |
| stem | 192×35×35 |
| mixed1 to 3: 5×5 and two 3×3 | 256, 288, 288 × 35×35 |
| shrink1 | 768×17×17 |
| mixed4 to 7: 1×7 and 7×1 | 768×17×17 |
| shrink2 | 1280×8×8 |
| mixed8 and 9: 1×3 and 3×1 in parallel | 2048×8×8 |

An auxiliary classifier after mixed7 is optional; with it, training returns both outputs, evaluation only the main one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from convmesh.models.blocks import Branches, classifier, scaled, stages, unit
from convmesh.models.initialise import convolutions, dense_layers, truncated_normal

NORM_EPSILON = 1e-3


class Inception3(nn.Module):
    """All filters scaled by `width`."""

    def __init__(self, channels: int, classes: int, auxiliary: bool, width: float, dropout: float) -> None:
        super().__init__()
        size = partial(scaled, width=width)
        self.stem = _stem(channels, size)
        self.body = _body(size)
        self.auxiliary = _auxiliary(size, classes) if auxiliary else None
        self.top = _top(size)
        self.head = classifier(_top_channels(size), classes, dropout)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.body(self.stem(x))
        logits = self.head(self.top(y))
        return (logits, self.auxiliary(y)) if self.auxiliary is not None and self.training else logits


def inception3(
    channels: int = 3, classes: int = 1000, auxiliary: bool = False, width: float = 1.0, dropout: float = 0.5
) -> Inception3:
    """Images of 299×299."""
    net = Inception3(channels, classes, auxiliary, width, dropout)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eps = NORM_EPSILON
    truncated_normal(convolutions(net), std=0.1)
    truncated_normal(dense_layers(net), std=0.1)
    if net.auxiliary is not None:
        truncated_normal(convolutions(net.auxiliary[2]), std=0.01)
        truncated_normal(dense_layers(net.auxiliary), std=0.001)
    return net


def _chain(channels: int, *units: tuple[int, Any] | tuple[int, Any, dict[str, Any]]) -> nn.Sequential:
    """A sequence of units, each given as filters, kernel and options."""
    layers = []
    for filters, kernel, *options in units:
        layers.append(unit(channels, filters, kernel, **(options[0] if options else {})))
        channels = filters
    return nn.Sequential(*layers)


def _pooled(channels: int, filters: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, padding=1), unit(channels, filters, 1))


TIGHT: dict[str, Any] = {"padding": 0}
HALVE: dict[str, Any] = {"padding": 0, "stride": 2}


def _stem(channels: int, size: Any) -> nn.Sequential:
    first = _chain(channels, (size(32), 3, HALVE), (size(32), 3, TIGHT), (size(64), 3))
    second = _chain(size(64), (size(80), 1), (size(192), 3, TIGHT))
    return nn.Sequential(first, nn.MaxPool2d(3, 2), second, nn.MaxPool2d(3, 2))


def _body(size: Any) -> nn.Sequential:
    fine, coarse = [size(64), size(64), size(96)], [size(192)] * 4
    first = sum(fine) + size(32)
    later = sum(fine) + size(64)
    return stages(
        mixed1=_square(size(192), size, size(32)),
        mixed2=_square(first, size, size(64)),
        mixed3=_square(later, size, size(64)),
        shrink1=_shrink_square(later, size),
        mixed4=_factored(size(384) + size(96) + later, size, size(128)),
        mixed5=_factored(sum(coarse), size, size(160)),
        mixed6=_factored(sum(coarse), size, size(160)),
        mixed7=_factored(sum(coarse), size, size(192)),
    )


def _top(size: Any) -> nn.Sequential:
    channels = 4 * size(192)
    return stages(
        shrink2=_shrink_factored(channels, size),
        mixed8=_wide(size(320) + size(192) + channels, size),
        mixed9=_wide(_top_channels(size), size),
    )


def _top_channels(size: Any) -> int:
    channels: int = size(320) + 4 * size(384) + size(192)
    return channels


def _square(channels: int, size: Any, pooled: int) -> Branches:
    """Figure 5 of the paper: 1×1, 5×5, two 3×3, and a mean."""
    return Branches(
        _chain(channels, (size(64), 1)),
        _chain(channels, (size(48), 1), (size(64), 5)),
        _chain(channels, (size(64), 1), (size(96), 3), (size(96), 3)),
        _pooled(channels, pooled),
    )


def _shrink_square(channels: int, size: Any) -> Branches:
    return Branches(
        _chain(channels, (size(384), 3, HALVE)),
        _chain(channels, (size(64), 1), (size(96), 3), (size(96), 3, HALVE)),
        nn.MaxPool2d(3, 2),
    )


def _factored(channels: int, size: Any, inner: int) -> Branches:
    """Figure 6: 7×7 as 1×7 and 7×1, once and twice."""
    row, column, out = (1, 7), (7, 1), size(192)
    return Branches(
        _chain(channels, (out, 1)),
        _chain(channels, (inner, 1), (inner, row), (out, column)),
        _chain(channels, (inner, 1), (inner, column), (inner, row), (inner, column), (out, row)),
        _pooled(channels, out),
    )


def _shrink_factored(channels: int, size: Any) -> Branches:
    inner = size(192)
    return Branches(
        _chain(channels, (inner, 1), (size(320), 3, HALVE)),
        _chain(channels, (inner, 1), (inner, (1, 7)), (inner, (7, 1)), (inner, 3, HALVE)),
        nn.MaxPool2d(3, 2),
    )


def _wide(channels: int, size: Any) -> Branches:
    """Figure 7: branches that end in 1×3 and 3×1 in parallel."""
    out = size(384)

    def fork() -> Branches:
        return Branches(unit(out, out, (1, 3)), unit(out, out, (3, 1)))

    return Branches(
        _chain(channels, (size(320), 1)),
        nn.Sequential(_chain(channels, (out, 1)), fork()),
        nn.Sequential(_chain(channels, (size(448), 1), (out, 3)), fork()),
        _pooled(channels, size(192)),
    )


def _auxiliary(size: Any, classes: int) -> nn.Sequential:
    narrow, wide = unit(4 * size(192), size(128), 1), unit(size(128), size(768), 5, padding=0)
    return nn.Sequential(nn.AvgPool2d(5, 3), narrow, wide, classifier(size(768), classes))
