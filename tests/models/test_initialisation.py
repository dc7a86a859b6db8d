"""Weights are drawn as published: bounds exactly, deviations of large layers to a few per cent."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from convmesh.models import create
from convmesh.models.initialise import convolutions, dense_layers, weighted_layers

SAMPLES = 4000
"""Weights that a layer needs for its deviation to be accurate to a few per cent."""


def fan_in(layer: nn.Module) -> int:
    weight = layer.get_parameter("weight")
    return math.prod(weight.shape[1:])


def fan_out(layer: nn.Module) -> int:
    weight = layer.get_parameter("weight")
    return weight.shape[0] * math.prod(weight.shape[2:])


def he_in(layer: nn.Module) -> float:
    return math.sqrt(2 / fan_in(layer))


def he_out(layer: nn.Module) -> float:
    return math.sqrt(2 / fan_out(layer))


def glorot(layer: nn.Module) -> float:
    return math.sqrt(2 / (fan_in(layer) + fan_out(layer)))


def torch_default(layer: nn.Module) -> float:
    return math.sqrt(1 / (3 * fan_in(layer)))


DEVIATIONS: dict[str, tuple[dict[str, object], Callable[[nn.Module], float]]] = {
    "vgg16": ({"width": 1 / 4}, he_out),
    "resnet18": ({"filters": 16}, he_out),
    "resnet50": ({"filters": 16}, he_out),
    "mobilenet-v2": ({}, he_out),
    "densenet121": ({"growth": 8, "filters": 16}, he_in),
    "unet2d": ({"filters": 8}, he_in),
    "unet3d": ({"filters": 8, "most_filters": 32}, torch_default),
    "vnet": ({"filters": 4}, he_in),
    "cosmoflow": ({"width": 1 / 4, "extent": 32}, glorot),
    "cosmoflow-256": ({"width": 1 / 4}, he_in),
    "meshnet": ({"filters": (16, 24, 32, 32, 32, 16)}, he_in),
    "alexnet": ({"width": 1 / 4}, lambda _: 0.01),
    "convnext-tiny": ({"filters": 16}, lambda _: 0.02 * TRUNCATED),
    "inception3": ({"width": 1 / 8}, lambda _: 0.1 * TRUNCATED),
}

TRUNCATED = 0.8796
"""The deviation of a standard normal truncated at ±2."""


@pytest.mark.parametrize("name", DEVIATIONS)
def test_convolutions_have_the_published_deviation(name: str) -> None:
    torch.manual_seed(0)
    sizes, expected = DEVIATIONS[name]
    check_deviation(create(name, **sizes), expected)


def check_deviation(net: nn.Module, expected: Callable[[nn.Module], float]) -> None:
    large = [layer for layer in convolutions(net) if layer.weight.numel() > SAMPLES]
    assert large
    for layer in large:
        assert layer.weight.std().item() == pytest.approx(expected(layer), rel=0.08)
        assert layer.weight.mean().abs().item() < 0.1 * expected(layer)


@pytest.mark.parametrize(("name", "deviation"), [("vgg16", 0.01), ("alexnet", 0.01), ("mobilenet-v2", 0.01)])
def test_dense_layers_have_the_published_deviation(name: str, deviation: float) -> None:
    torch.manual_seed(0)
    for layer in dense_layers(create(name, width=0.25)):
        assert layer.weight.std().item() == pytest.approx(deviation, rel=0.08)


def test_lenet_is_uniform_within_its_fan_in() -> None:
    torch.manual_seed(0)
    for layer in weighted_layers(create("lenet5")):
        bound = 2.4 / fan_in(layer)
        assert 0.9 * bound < layer.weight.abs().max() <= bound
        assert layer.bias is not None
        assert not layer.bias.any()


def test_alexnet_starts_with_biases_of_one_before_some_relus() -> None:
    first = [
        layer.bias[0].item() for layer in weighted_layers(create("alexnet", width=1 / 16)) if layer.bias is not None
    ]
    assert first == [0, 1, 0, 1, 1, 1, 1, 0]


def test_convnext_starts_close_to_the_identity() -> None:
    net = create("convnext-tiny", filters=4)
    scales = [value for name, value in net.named_parameters() if name.endswith(".scale")]
    assert len(scales) == 18
    assert all((scale == 1e-6).all() for scale in scales)


@pytest.mark.parametrize("part", ["middle", "exit", "pyramid.views"])
def test_the_encoder_of_deepcam_has_the_published_deviation(part: str) -> None:
    torch.manual_seed(0)
    check_deviation(create("deepcam", width=1 / 8, middle_blocks=1).get_submodule(part), he_in)


def test_blocks_of_a_resnet_may_start_at_zero() -> None:
    net = create("resnet50", filters=4, added=0.0)
    assert not net.get_parameter("stage3.4.body.2.norm.weight").any()
    assert (net.get_parameter("stage3.4.body.1.norm.weight") == 1).all()


def test_the_mean_view_of_deepcam_starts_unscaled() -> None:
    net = create("deepcam", width=1 / 64)
    assert (net.get_parameter("pyramid.affine.weight") == 1).all()
    assert (net.get_parameter("pyramid.affine.bias") == 0).all()


def test_inceptions_norms_have_the_published_epsilon() -> None:
    norms = [layer for layer in create("inception3", width=1 / 16).modules() if isinstance(layer, nn.BatchNorm2d)]
    assert {norm.eps for norm in norms} == {1e-3}
