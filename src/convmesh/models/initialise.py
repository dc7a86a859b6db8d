"""Weight initialisation as in the papers, in place; on the meta device the functions do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import nn

Convolution = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
Layer = nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d | nn.ConvTranspose3d | nn.Linear


def convolutions(net: nn.Module) -> Iterator[Layer]:
    return (layer for layer in net.modules() if isinstance(layer, Convolution))


def dense_layers(net: nn.Module) -> Iterator[Layer]:
    return (layer for layer in net.modules() if isinstance(layer, nn.Linear))


def weighted_layers(net: nn.Module) -> Iterator[Layer]:
    return (layer for layer in net.modules() if isinstance(layer, (*Convolution, nn.Linear)))


def _with_data(layers: Iterator[Layer]) -> Iterator[Layer]:
    """Layers with data: torch takes longer to draw weights without data than to build the rest of such a network."""
    return (layer for layer in layers if not layer.weight.is_meta)


def he_normal(layers: Iterator[Layer], mode: Literal["fan_in", "fan_out"] = "fan_in") -> None:
    """He et al. 2015: variance 2 / fan; biases are 0."""
    for layer in _with_data(layers):
        nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="relu")
        fill_bias(layer)


def glorot_uniform(layers: Iterator[Layer]) -> None:
    """Glorot and Bengio 2010: variance 2 / (fan in + fan out); biases are 0."""
    for layer in _with_data(layers):
        nn.init.xavier_uniform_(layer.weight)
        fill_bias(layer)


def normal(layers: Iterator[Layer], std: float) -> None:
    """Normal with a fixed deviation; biases are 0."""
    for layer in _with_data(layers):
        nn.init.normal_(layer.weight, std=std)
        fill_bias(layer)


def truncated_normal(layers: Iterator[Layer], std: float) -> None:
    """Normal, redrawn beyond two standard deviations; biases are 0."""
    for layer in _with_data(layers):
        nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
        fill_bias(layer)


def fill_bias(layer: Layer, value: float = 0.0) -> None:
    if layer.bias is not None:
        nn.init.constant_(layer.bias, value)
