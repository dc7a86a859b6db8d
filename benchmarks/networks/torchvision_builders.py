"""torchvision's networks: every builder of `torchvision.models` that takes one tensor of images or of a video."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from benchmarks.networks.factories import IMAGE, Published, Shape, called

_CLASSIFICATION = """
    alexnet convnext_base convnext_small convnext_tiny densenet121 densenet161 densenet169 densenet201 efficientnet_b0
    efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4 efficientnet_b5 efficientnet_b6 efficientnet_b7
    efficientnet_v2_m efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5 mnasnet0_75 mnasnet1_0 mnasnet1_3
    mobilenet_v2 mobilenet_v3_large mobilenet_v3_small regnet_x_16gf regnet_x_1_6gf regnet_x_3_2gf regnet_x_400mf
    regnet_x_800mf regnet_x_8gf regnet_y_16gf regnet_y_1_6gf regnet_y_3_2gf regnet_y_400mf regnet_y_800mf regnet_y_8gf
    resnet101 resnet152 resnet18 resnet34 resnet50 resnext101_32x8d resnext101_64x4d resnext50_32x4d shufflenet_v2_x0_5
    shufflenet_v2_x1_0 shufflenet_v2_x1_5 shufflenet_v2_x2_0 squeezenet1_0 squeezenet1_1 swin_b swin_s swin_t swin_v2_b
    swin_v2_s swin_v2_t vgg11 vgg11_bn vgg13 vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn vit_b_16 vit_b_32 wide_resnet101_2
    wide_resnet50_2
""".split()  # noqa: SIM905 - a list of words reads better

_SEGMENTATION = """
    deeplabv3_mobilenet_v3_large deeplabv3_resnet101 deeplabv3_resnet50 fcn_resnet101 fcn_resnet50
    lraspp_mobilenet_v3_large
""".split()  # noqa: SIM905

_VIDEO = "mc3_18 mvit_v1_b mvit_v2_s r2plus1d_18 r3d_18 s3d swin3d_b swin3d_s swin3d_t".split()  # noqa: SIM905

TOO_LARGE = """
    convnext_large efficientnet_v2_l regnet_x_32gf regnet_y_128gf regnet_y_32gf vit_h_14 vit_l_16 vit_l_32
""".split()  # noqa: SIM905
"""More and wider blocks of those above, over a hundred million weights: too many for this in float64."""

_CLIP = (2, 3, 4, 32, 32)
_SHAPES: dict[str, Shape] = {
    "alexnet": (2, 3, 96, 96),
    "inception_v3": (2, 3, 299, 299),
    "maxvit_t": (2, 3, 224, 224),
    "vit_b_16": (2, 3, 32, 32),
    "vit_b_32": (2, 3, 64, 64),
    "s3d": (2, 3, 13, 209, 209),
    "mvit_v1_b": (2, 3, 4, 64, 64),
    "mvit_v2_s": (2, 3, 4, 64, 64),
}
"""The smallest that they take, where that is not `IMAGE` or `_CLIP`."""

_OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"init_weights": True},
    "inception_v3": {"init_weights": True},
    "vit_b_16": {"image_size": 32},
    "vit_b_32": {"image_size": 64},
}

_SIZE_OF_MVIT = {"spatial_size": (64, 64), "temporal_size": 4}


def torchvision_networks() -> Iterator[Published]:
    """All of them."""
    for name in _CLASSIFICATION:
        yield _torchvision("torchvision.models", name, IMAGE)
    for name in _SEGMENTATION:
        yield _torchvision("torchvision.models.segmentation", name, IMAGE, weights_backbone=None)
    for name in _VIDEO:
        network = _torchvision("torchvision.models.video", name, _CLIP)
        yield replace(network, build=partial(_small_mvit, name)) if name.startswith("mvit") else network


def _torchvision(module: str, name: str, shape: Shape, **options: Any) -> Published:
    build = called(module, name, weights=None, **options, **_OPTIONS.get(name, {}))
    return Published(f"torchvision.{name}", build, _SHAPES.get(name, shape))


def _small_mvit(name: str) -> nn.Module:
    """As its builder makes it, but for the size of its clips, which the builder fixes."""
    home = importlib.import_module("torchvision.models.video.mvit")
    own = home._mvit
    home._mvit = lambda **options: own(**options | _SIZE_OF_MVIT)  # type: ignore[attr-defined]
    try:
        made: nn.Module = getattr(home, name)(weights=None)
    finally:
        home._mvit = own  # type: ignore[attr-defined]
    return made
