"""The networks of the survey: how each is built, and a small input for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Published:
    """A network of a package, and the shape of a global batch for it."""

    name: str
    build: Callable[[], nn.Module]
    shape: Shape

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().double().train()

    def versions(self) -> str:
        packages = ("torch", _PACKAGES[self.name.partition(".")[0]])
        return ", ".join(f"{package} {version(package)}" for package in packages)


_PACKAGES = {
    "torchvision": "torchvision",
    "timm": "timm",
    "smp": "segmentation-models-pytorch",
    "monai": "monai",
    "nnunet": "dynamic-network-architectures",
}
"""The distribution that a name begins with."""


def _called(module: str, function: str, **options: Any) -> Callable[[], nn.Module]:
    """A factory of a package, imported only when it is called."""

    def build() -> nn.Module:
        made: nn.Module = getattr(importlib.import_module(module), function)(**options)
        return made

    return build


_IMAGE = (2, 3, 64, 64)

_TORCHVISION: dict[str, Shape] = {
    "alexnet": (2, 3, 96, 96), "vgg11_bn": _IMAGE, "resnet18": _IMAGE, "resnet50": _IMAGE, "wide_resnet50_2": _IMAGE,
    "resnext50_32x4d": _IMAGE, "densenet121": _IMAGE, "squeezenet1_1": _IMAGE, "googlenet": _IMAGE,
    "inception_v3": (2, 3, 299, 299), "mnasnet0_5": _IMAGE, "mobilenet_v2": _IMAGE, "mobilenet_v3_small": _IMAGE,
    "shufflenet_v2_x0_5": _IMAGE, "efficientnet_b0": _IMAGE, "efficientnet_v2_s": _IMAGE, "regnet_y_400mf": _IMAGE,
    "convnext_tiny": _IMAGE, "swin_t": _IMAGE, "swin_v2_t": _IMAGE, "vit_b_16": (2, 3, 32, 32),
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
    "resnet18": _IMAGE, "resnetv2_50": _IMAGE, "seresnet18": _IMAGE, "ecaresnet26t": _IMAGE, "skresnet18": _IMAGE,
    "res2net50_26w_4s": _IMAGE, "resnest14d": _IMAGE, "dla34": _IMAGE, "hrnet_w18_small": _IMAGE, "vovnet39a": _IMAGE,
    "efficientnet_b0": _IMAGE, "mobilenetv3_small_050": _IMAGE, "mixnet_s": _IMAGE, "ghostnet_050": _IMAGE,
    "regnetx_002": _IMAGE, "repvgg_a0": _IMAGE, "nfnet_f0": _IMAGE, "convnext_atto": _IMAGE, "convnextv2_atto": _IMAGE,
    "cspresnet50": _IMAGE, "darknet53": _IMAGE, "xception41": _IMAGE, "edgenext_xx_small": _IMAGE,
    "poolformer_s12": _IMAGE, "mobilevit_xxs": _IMAGE, "coatnet_pico_rw_224": (2, 3, 224, 224),
    "vit_tiny_patch16_224": (2, 3, 32, 32), "swin_tiny_patch4_window7_224": (2, 3, 224, 224),
    "maxvit_pico_rw_256": (2, 3, 256, 256), "mixer_s32_224": (2, 3, 224, 224), "efficientvit_b0": _IMAGE,
    "mambaout_femto": _IMAGE, "fastvit_t8": _IMAGE, "inception_next_tiny": _IMAGE,
}  # fmt: skip
_TIMM_OPTIONS: dict[str, dict[str, Any]] = {"vit_tiny_patch16_224": {"img_size": 32}}

_SMP: dict[str, Shape] = {
    "Unet": _IMAGE, "UnetPlusPlus": _IMAGE, "MAnet": _IMAGE, "Linknet": _IMAGE, "FPN": _IMAGE, "PSPNet": _IMAGE,
    "DeepLabV3": _IMAGE, "DeepLabV3Plus": _IMAGE, "PAN": (2, 3, 128, 128), "UPerNet": _IMAGE,
}  # fmt: skip

_VOLUME = (2, 1, 32, 32, 32)
_3D = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
_MONAI: dict[str, tuple[dict[str, Any], Shape]] = {
    "UNet": ({**_3D, "channels": (4, 8, 16), "strides": (2, 2), "num_res_units": 2}, _VOLUME),
    "BasicUNet": ({**_3D, "features": (4, 4, 8, 8, 8, 4)}, _VOLUME),
    "BasicUNetPlusPlus": ({**_3D, "features": (4, 4, 8, 8, 8, 4)}, _VOLUME),
    "AttentionUnet": ({**_3D, "channels": (4, 8, 16), "strides": (2, 2)}, _VOLUME),
    "DynUNet": (
        {
            **_3D, "kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2],
            "filters": [4, 8, 16], "res_block": True, "deep_supervision": True,
        },
        _VOLUME,
    ),
    "VNet": (_3D, (1, 1, 32, 32, 32)),
    "SegResNet": ({**_3D, "init_filters": 8}, _VOLUME),
    "SegResNetVAE": ({**_3D, "init_filters": 8, "input_image_size": (32, 32, 32)}, _VOLUME),
    "SegResNetDS": ({**_3D, "init_filters": 8, "blocks_down": (1, 1, 1)}, _VOLUME),
    "HighResNet": (_3D, (2, 1, 16, 16, 16)),
    "DenseNet121": (_3D, _VOLUME),
    "SEResNet50": ({"spatial_dims": 2, "in_channels": 3, "num_classes": 2}, _IMAGE),
    "EfficientNetBN": (
        {"model_name": "efficientnet-b0", "spatial_dims": 2, "in_channels": 3, "pretrained": False}, _IMAGE,
    ),
    "FlexibleUNet": ({"in_channels": 3, "out_channels": 2, "backbone": "efficientnet-b0", "spatial_dims": 2}, _IMAGE),
    "UNETR": (
        {
            "in_channels": 1, "out_channels": 2, "img_size": 32, "hidden_size": 48, "mlp_dim": 96, "num_heads": 4,
            "feature_size": 8,
        },
        _VOLUME,
    ),
    "SwinUNETR": ({"in_channels": 1, "out_channels": 2, "feature_size": 12, "spatial_dims": 2}, (2, 1, 64, 64)),
    "ViT": (
        {
            "in_channels": 1, "img_size": 32, "patch_size": 8, "hidden_size": 48, "mlp_dim": 96, "num_layers": 2,
            "num_heads": 4, "classification": True,
        },
        _VOLUME,
    ),
    "AutoencoderKL": (
        {
            "spatial_dims": 3, "in_channels": 1, "out_channels": 1, "channels": (8, 8), "num_res_blocks": (1, 1),
            "attention_levels": (False, True), "norm_num_groups": 4, "latent_channels": 3,
        },
        (2, 1, 16, 16, 16),
    ),
}  # fmt: skip

_NNUNET = "dynamic_network_architectures.architectures"


def _nnunet() -> Iterator[Published]:
    plain = {
        "input_channels": 1, "n_stages": 3, "features_per_stage": (4, 8, 16), "conv_op": nn.Conv3d, "kernel_sizes": 3,
        "strides": (1, 2, 2), "num_classes": 2, "conv_bias": True, "norm_op": nn.InstanceNorm3d,
        "norm_op_kwargs": {"affine": True}, "nonlin": nn.LeakyReLU, "deep_supervision": True,
        "n_conv_per_stage_decoder": 1,
    }  # fmt: skip
    for name, blocks in (("PlainConvUNet", "n_conv_per_stage"), ("ResidualEncoderUNet", "n_blocks_per_stage")):
        yield Published(f"nnunet.{name}", _called(f"{_NNUNET}.unet", name, **plain, **{blocks: 2}), _VOLUME)
    primus = _called(
        f"{_NNUNET}.primus", "Primus", input_channels=1, num_classes=2, embed_dim=96, patch_embed_size=(8, 8, 8),
        input_shape=(32, 32, 32), eva_depth=2, eva_numheads=4, use_rot_pos_emb=False,
    )  # fmt: skip
    yield Published("nnunet.Primus", primus, _VOLUME)


def published() -> dict[str, Published]:
    """All networks, by name."""
    return {network.name: network for network in _all()}


def _all() -> Iterator[Published]:
    for name, shape in _TORCHVISION.items():
        yield _torchvision("torchvision.models", name, shape)
    for name in _SEGMENTATION:
        yield _torchvision("torchvision.models.segmentation", name, _IMAGE, weights_backbone=None)
    for name, shape in _VIDEO.items():
        yield _torchvision("torchvision.models.video", name, shape)
    for name, shape in _TIMM.items():
        options = {"model_name": name, "pretrained": False, "num_classes": 10, **_TIMM_OPTIONS.get(name, {})}
        yield Published(f"timm.{name}", _called("timm", "create_model", **options), shape)
    for name, shape in _SMP.items():
        options = {"encoder_name": "resnet18", "encoder_weights": None, "classes": 2}
        yield Published(f"smp.{name}", _called("segmentation_models_pytorch", name, **options), shape)
    for name, (options, shape) in _MONAI.items():
        yield Published(f"monai.{name}", _called("monai.networks.nets", name, **options), shape)
    yield from _nnunet()


def _torchvision(module: str, name: str, shape: Shape, **options: Any) -> Published:
    build = _called(module, name, weights=None, **options, **_TORCHVISION_OPTIONS.get(name, {}))
    return Published(f"torchvision.{name}", build, shape)
