"""The networks of the survey."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.networks.factories import IMAGE, Published, Shape, called
from benchmarks.networks.medical import medical
from benchmarks.networks.timm_families import AT_64, SIZED

_TORCHVISION: dict[str, Shape] = {
    "alexnet": (2, 3, 96, 96), "vgg11_bn": IMAGE, "resnet18": IMAGE, "resnet50": IMAGE, "wide_resnet50_2": IMAGE,
    "resnext50_32x4d": IMAGE, "densenet121": IMAGE, "squeezenet1_1": IMAGE, "googlenet": IMAGE,
    "inception_v3": (2, 3, 299, 299), "mnasnet0_5": IMAGE, "mobilenet_v2": IMAGE, "mobilenet_v3_small": IMAGE,
    "shufflenet_v2_x0_5": IMAGE, "efficientnet_b0": IMAGE, "efficientnet_v2_s": IMAGE, "regnet_y_400mf": IMAGE,
    "convnext_tiny": IMAGE, "swin_t": IMAGE, "swin_v2_t": IMAGE, "vit_b_16": (2, 3, 32, 32),
    "maxvit_t": (2, 3, 224, 224),
}  # fmt: skip
_TORCHVISION_OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"init_weights": True},
    "inception_v3": {"init_weights": True},
    "vit_b_16": {"image_size": 32},
}
_SEGMENTATION = ("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
_VIDEO: dict[str, Shape] = {
    "r3d_18": (2, 3, 4, 32, 32), "mc3_18": (2, 3, 4, 32, 32), "r2plus1d_18": (2, 3, 4, 32, 32),
    "s3d": (2, 3, 13, 209, 209), "mvit_v1_b": (2, 3, 16, 224, 224), "swin3d_t": (2, 3, 4, 32, 32),
}  # fmt: skip

_TIMM: dict[str, Shape] = {
    "resnet18": IMAGE, "resnetv2_50": IMAGE, "seresnet18": IMAGE, "ecaresnet26t": IMAGE, "skresnet18": IMAGE,
    "res2net50_26w_4s": IMAGE, "resnest14d": IMAGE, "dla34": IMAGE, "hrnet_w18_small": IMAGE, "vovnet39a": IMAGE,
    "efficientnet_b0": IMAGE, "mobilenetv3_small_050": IMAGE, "mixnet_s": IMAGE, "ghostnet_050": IMAGE,
    "regnetx_002": IMAGE, "repvgg_a0": IMAGE, "nfnet_f0": IMAGE, "convnext_atto": IMAGE, "convnextv2_atto": IMAGE,
    "cspresnet50": IMAGE, "darknet53": IMAGE, "xception41": IMAGE, "edgenext_xx_small": IMAGE,
    "poolformer_s12": IMAGE, "mobilevit_xxs": IMAGE, "coatnet_pico_rw_224": (2, 3, 224, 224),
    "vit_tiny_patch16_224": (2, 3, 32, 32), "swin_tiny_patch4_window7_224": (2, 3, 224, 224),
    "maxvit_pico_rw_256": (2, 3, 256, 256), "mixer_s32_224": (2, 3, 224, 224), "efficientvit_b0": IMAGE,
    "mambaout_femto": IMAGE, "fastvit_t8": IMAGE, "inception_next_tiny": IMAGE,
}  # fmt: skip
_TIMM_OPTIONS: dict[str, dict[str, Any]] = {"vit_tiny_patch16_224": {"img_size": 32}}

_SMP: dict[str, Shape] = {
    "Unet": IMAGE, "UnetPlusPlus": IMAGE, "MAnet": IMAGE, "Linknet": IMAGE, "FPN": IMAGE, "PSPNet": IMAGE,
    "DeepLabV3": IMAGE, "DeepLabV3Plus": IMAGE, "PAN": (2, 3, 128, 128), "UPerNet": IMAGE,
}  # fmt: skip


def published() -> dict[str, Published]:
    """All networks, by name."""
    return {network.name: network for network in _all()}


def _all() -> Iterator[Published]:
    for name, shape in _TORCHVISION.items():
        yield _torchvision("torchvision.models", name, shape)
    for name in _SEGMENTATION:
        yield _torchvision("torchvision.models.segmentation", name, IMAGE, weights_backbone=None)
    for name, shape in _VIDEO.items():
        yield _torchvision("torchvision.models.video", name, shape)
    for name, shape in _TIMM.items():
        yield _timm(name, shape, **_TIMM_OPTIONS.get(name, {}))
    for name in AT_64:
        yield _timm(name, IMAGE)
    for name in SIZED:
        yield _timm(name, IMAGE, img_size=64)
    for name, shape in _SMP.items():
        options = {"encoder_name": "resnet18", "encoder_weights": None, "classes": 2}
        yield Published(f"smp.{name}", called("segmentation_models_pytorch", name, **options), shape)
    yield from medical()


def _torchvision(module: str, name: str, shape: Shape, **options: Any) -> Published:
    build = called(module, name, weights=None, **options, **_TORCHVISION_OPTIONS.get(name, {}))
    return Published(f"torchvision.{name}", build, shape)


def _timm(name: str, shape: Shape, **options: Any) -> Published:
    build = called("timm", "create_model", model_name=name, pretrained=False, num_classes=10, **options)
    return Published(f"timm.{name}", build, shape)
