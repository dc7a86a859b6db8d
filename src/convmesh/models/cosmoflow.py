"""CosmoFlow: four cosmological parameters from a volume of dark matter at four redshifts (Mathuriya et al., SC'18).

- `cosmoflow`: MLPerf HPC, 4×128³. Five 3×3×3 convolutions of 32 to 512 filters, each with LeakyReLU and max 2×2×2, then
  dense layers of 128, 64 and 4; outputs within ±1.2.
- `cosmoflow_256`, `cosmoflow_512`: the layer tables of ParaDL (Kahira et al., HPDC'21), which measured them. Seven
  convolutions of 16 to 256 and finally 128 filters, the last three of 2×2×2, one of stride 2; means of 2×2×2 between;
  dense layers of 2048, 256 and 4. The first pads to keep extents, the second does not pad.
- `cosmoflow_bn`: Oyama et al., "The case for strong scaling in deep learning", 2021: 3×3×3 throughout, mean 3×3×3 of
  stride 2 after every convolution, one convolution less for half the extent, optional batch norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from convmesh.models.blocks import scaled, unit
from convmesh.models.initialise import glorot_uniform, he_normal, weighted_layers

SLOPE = 0.3
"""Slope of the LeakyReLUs: the default of Keras, in which all of these were written."""

BOUND = 1.2
"""Bound of the outputs; targets are normalised to ±1."""


@dataclass(frozen=True)
class Layer:
    """One convolution and the pooling after it."""

    filters: int
    kernel: int = 3
    stride: int = 1
    padded: bool = True
    pool: nn.Module | None = None

    def build(self, channels: int, width: float, norm: str | None) -> nn.Sequential:
        before, after = divmod(self.kernel - 1, 2)
        # As with "same" in TensorFlow, an even kernel needs one more zero at the end than at the start.
        ragged = [nn.ConstantPad3d((0, 1) * 3, 0.0)] if self.padded and after else []
        options: dict[str, Any] = {
            "stride": self.stride,
            "padding": before if self.padded else 0,
            "dims": 3,
            "norm": norm,
        }
        convolution = unit(channels, scaled(self.filters, width), self.kernel, activation=_leaky, **options)
        return nn.Sequential(*ragged, convolution, *([self.pool] if self.pool is not None else []))


def _leaky() -> nn.Module:
    return nn.LeakyReLU(SLOPE)


class CosmoFlow(nn.Module):
    """Convolutions, dense layers and a bound on the outputs."""

    def __init__(self, convolutions: nn.Sequential, dense: nn.Sequential) -> None:
        super().__init__()
        self.convolutions, self.dense = convolutions, dense

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return BOUND * torch.tanh(self.dense(self.convolutions(x).flatten(1)))


def _convolutions(layers: Iterable[Layer], channels: int, width: float, norm: str | None) -> nn.Sequential:
    built = []
    for layer in layers:
        built.append(layer.build(channels, width, norm))
        channels = scaled(layer.filters, width)
    return nn.Sequential(*built)


def _dense(sizes: Sequence[int], dropout: float) -> nn.Sequential:
    """Dense layers with an activation and dropout between."""
    layers: list[nn.Module] = [nn.Linear(sizes[0], sizes[1])]
    for size, following in itertools.pairwise(sizes[1:]):
        layers += [_leaky(), nn.Dropout(dropout), nn.Linear(size, following)]
    return nn.Sequential(*layers)


def cosmoflow(
    channels: int = 4,
    outputs: int = 4,
    extent: int = 128,
    layers: int = 5,
    width: float = 1.0,
    dropout: float = 0.5,
    norm: str | None = None,
) -> CosmoFlow:
    """The network of MLPerf HPC; `extent` is that of the input cube."""
    table = [Layer(32 * 2**i, pool=nn.MaxPool3d(2)) for i in range(layers)]
    flat = scaled(table[-1].filters, width) * (extent >> layers) ** 3
    dense = _dense([flat, scaled(128, width), scaled(64, width), outputs], dropout)
    net = CosmoFlow(_convolutions(table, channels, width, norm), dense)
    glorot_uniform(weighted_layers(net))
    return net


def _paradl_table(strides: Sequence[int], padded: bool) -> list[Layer]:
    """Seven layers that end in one voxel."""
    rows = zip((16, 32, 64, 128, 256, 256), (3, 3, 3, 3, 2, 2), strides, strict=True)
    return [*(Layer(f, k, s, padded, nn.AvgPool3d(2)) for f, k, s in rows), Layer(128, kernel=2, padded=False)]


def _paradl(
    table: list[Layer], channels: int, outputs: int, width: float, dropout: float, norm: str | None
) -> CosmoFlow:
    sizes = [scaled(size, width) for size in (table[-1].filters, 2048, 256)]
    net = CosmoFlow(_convolutions(table, channels, width, norm), _dense([*sizes, outputs], dropout))
    he_normal(weighted_layers(net))
    return net


def cosmoflow_256(
    channels: int = 4,
    outputs: int = 4,
    width: float = 1.0,
    dropout: float = 0.5,
    norm: str | None = None,
    skipped: int = 0,
) -> CosmoFlow:
    """Cubes of 256³; with 1, 2 or 3 layers skipped, 128³, 64³ or 32³."""
    table = _paradl_table((1, 1, 1, 2, 1, 1), padded=True)
    return _paradl(table[skipped:], channels, outputs, width, dropout, norm)


def cosmoflow_512(
    channels: int = 4,
    outputs: int = 4,
    width: float = 1.0,
    dropout: float = 0.5,
    norm: str | None = None,
    skipped: int = 0,
) -> CosmoFlow:
    """Cubes of 512³; with 1, 2 or 3 layers skipped, 255³, 126³ or 31³."""
    table = _paradl_table((1, 1, 2, 1, 1, 1), padded=False)
    return _paradl(table[skipped:], channels, outputs, width, dropout, norm)


def cosmoflow_bn(
    channels: int = 4,
    outputs: int = 4,
    extent: int = 512,
    layers: int | None = None,
    width: float = 1.0,
    dropout: float = 0.5,
    norm: str | None = "batch",
) -> CosmoFlow:
    """Cubes of 128³, 256³ or 512³ with 5, 6 or 7 layers, so that the dense layers always get 2³ voxels."""
    table = [_oyama_layer(index) for index in range(layers or extent.bit_length() - 3)]
    for layer in table:
        extent = -(-extent // (2 * layer.stride))
    flat = scaled(table[-1].filters, width) * extent**3
    dense = _dense([flat, scaled(2048, width), scaled(256, width), outputs], dropout)
    net = CosmoFlow(_convolutions(table, channels, width, norm), dense)
    he_normal(weighted_layers(net))
    return net


def _oyama_layer(index: int) -> Layer:
    filters, stride = min(16 * 2**index, 256), 2 if index == 3 else 1
    return Layer(filters, stride=stride, pool=nn.AvgPool3d(3, 2, padding=1))
