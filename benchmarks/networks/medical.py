"""Networks of MONAI, nnU-Net and neuraloperator."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import nn

from benchmarks.networks.factories import IMAGE, Published, Shape, called

_VOLUME = (2, 1, 32, 32, 32)
_3D = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
# GlobalNet and VQVAE compute in float32 inside: in float64, in which the survey compares, they fail by themselves.
# MaskedAutoEncoderViT masks tokens at random, HyenaNDUNETR needs another package, and sizes only repeat blocks.
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
    "SEResNet50": ({"spatial_dims": 2, "in_channels": 3, "num_classes": 2}, IMAGE),
    "EfficientNetBN": (
        {"model_name": "efficientnet-b0", "spatial_dims": 2, "in_channels": 3, "pretrained": False}, IMAGE,
    ),
    "FlexibleUNet": ({"in_channels": 3, "out_channels": 2, "backbone": "efficientnet-b0", "spatial_dims": 2}, IMAGE),
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
    "AHNet": ({"spatial_dims": 2, "in_channels": 3, "out_channels": 2, "upsample_mode": "bilinear"}, (2, 3, 128, 128)),
    "AutoEncoder": ({**_3D, "channels": (4, 8), "strides": (2, 2), "num_res_units": 1}, _VOLUME),
    "Classifier": ({"in_shape": (1, 32, 32), "classes": 3, "channels": (4, 8), "strides": (2, 2)}, (2, 1, 32, 32)),
    "Regressor": (
        {"in_shape": (1, 32, 32), "out_shape": (3,), "channels": (4, 8), "strides": (2, 2)}, (2, 1, 32, 32),
    ),
    "DAF3D": ({"in_channels": 1, "out_channels": 2}, (2, 1, 16, 32, 32)),
    "HoVerNet": ({"mode": "fast", "decoder_padding": True}, (2, 3, 256, 256)),
    "MedNeXt": ({"init_filters": 4, "kernel_size": 3, "blocks_down": (1, 1, 1), "blocks_up": (1, 1, 1)}, _VOLUME),
    "ViTAutoEnc": (
        {
            "in_channels": 1, "img_size": 16, "patch_size": 4, "hidden_size": 48, "mlp_dim": 96, "num_layers": 2,
            "num_heads": 4,
        },
        (2, 1, 16, 16, 16),
    ),
    "PatchDiscriminator": ({"spatial_dims": 3, "channels": 4, "in_channels": 1}, _VOLUME),
    "Quicknat": ({"num_classes": 2, "num_filters": 8}, (2, 1, 64, 64)),
    "LocalNet": (
        {"spatial_dims": 3, "in_channels": 1, "num_channel_initial": 4, "extract_levels": (0, 1, 2)},
        (2, 1, 16, 16, 16),
    ),
    "ResNet": (
        {
            "block": "basic", "layers": [1, 1, 1, 1], "block_inplanes": [4, 8, 8, 16], "n_input_channels": 1,
            "num_classes": 3,
        },
        (2, 1, 64, 64, 64),
    ),
    "VoxelMorphUNet": (
        {
            "spatial_dims": 3, "in_channels": 2, "unet_out_channels": 8, "channels": (4, 8, 8, 8, 8, 8),
            "final_conv_channels": (4, 4),
        },
        (2, 2, 32, 32, 32),
    ),
    "SegResNetDS2": ({**_3D, "init_filters": 8, "blocks_down": (1, 1, 1)}, _VOLUME),
    "SEResNext50": ({"spatial_dims": 2, "in_channels": 3, "num_classes": 2}, IMAGE),
    "AutoencoderKL": (
        {
            "spatial_dims": 3, "in_channels": 1, "out_channels": 1, "channels": (8, 8), "num_res_blocks": (1, 1),
            "attention_levels": (False, True), "norm_num_groups": 4, "latent_channels": 3,
        },
        (2, 1, 16, 16, 16),
    ),
    "Critic": ({"in_shape": (1, 32, 32), "channels": (4, 8), "strides": (2, 2)}, (2, 1, 32, 32)),
    "Discriminator": ({"in_shape": (1, 32, 32), "channels": (4, 8), "strides": (2, 2)}, (2, 1, 32, 32)),
    "Generator": (
        {"latent_shape": (12,), "start_shape": (4, 8, 8), "channels": (8, 4), "strides": (2, 2)}, (2, 12),
    ),
    "FullyConnectedNet": ({"in_channels": 12, "out_channels": 4, "hidden_channels": (16, 8)}, (4, 12)),
    "VarFullyConnectedNet": (
        {"in_channels": 12, "out_channels": 12, "latent_size": 4, "encode_channels": (8,), "decode_channels": (8,)},
        (4, 12),
    ),
    "VarAutoEncoder": (
        {
            "spatial_dims": 2, "in_shape": (1, 32, 32), "out_channels": 1, "latent_size": 4, "channels": (4, 8),
            "strides": (2, 2),
        },
        (2, 1, 32, 32),
    ),
    "RegUNet": ({"spatial_dims": 3, "in_channels": 1, "num_channel_initial": 4, "depth": 2}, (2, 1, 16, 16, 16)),
    "MILModel": (
        {"num_classes": 3, "pretrained": False, "backbone": "resnet18", "mil_mode": "att_trans", "trans_blocks": 1},
        (2, 2, 3, 64, 64),
    ),
    "MultiScalePatchDiscriminator": (
        {"num_d": 2, "num_layers_d": 2, "spatial_dims": 2, "channels": 4, "in_channels": 1, "minimum_size_im": 64},
        (2, 1, 64, 64),
    ),
    "EfficientNetBNFeatures": (
        {"model_name": "efficientnet-b0", "spatial_dims": 2, "in_channels": 3, "pretrained": False}, IMAGE,
    ),
    "ResNetFeatures": (
        {"model_name": "resnet10", "pretrained": False, "spatial_dims": 3, "in_channels": 1}, _VOLUME,
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
        yield Published(f"nnunet.{name}", called(f"{_NNUNET}.unet", name, **plain, **{blocks: 2}), _VOLUME)
    primus = called(
        f"{_NNUNET}.primus", "Primus", input_channels=1, num_classes=2, embed_dim=96, patch_embed_size=(8, 8, 8),
        input_shape=(32, 32, 32), eva_depth=2, eva_numheads=4, use_rot_pos_emb=False,
    )  # fmt: skip
    yield Published("nnunet.Primus", primus, _VOLUME)


_WORDS = {
    "num_tokens": 16, "max_seq_len": 16, "attn_layers_dim": 32, "attn_layers_depth": 2, "attn_layers_heads": 4,
}  # fmt: skip


def _dints() -> nn.Module:
    """Searched for by others; here with every cell and the first operator of each."""
    nets = importlib.import_module("monai.networks.nets")
    every = [np.ones((4, 7)), np.ones((4, 7), dtype=int)]
    space = nets.TopologyInstance(arch_code=every, channel_mul=0.25, num_blocks=4, num_depths=3, spatial_dims=2)
    made: nn.Module = nets.DiNTS(dints_space=space, in_channels=1, num_classes=2, spatial_dims=2)
    return made


def medical() -> Iterator[Published]:
    """All of them."""
    for name, (options, shape) in _MONAI.items():
        yield Published(f"monai.{name}", called("monai.networks.nets", name, **options), shape)
    yield Published("monai.DiNTS", _dints, (2, 1, 32, 32))
    yield Published(
        "monai.DecoderOnlyTransformer",
        called("monai.networks.nets", "DecoderOnlyTransformer", **_WORDS),
        (2, 16),
        words=16,
    )
    yield from _nnunet()
    for name, options in _NEURALOP.items():
        yield Published(f"neuralop.{name}", called("neuralop.models", name, **options), (2, 1, 16, 16))


_NEURALOP: dict[str, dict[str, Any]] = {
    "FNO": {"n_modes": (6, 6), "in_channels": 1, "out_channels": 1, "hidden_channels": 8, "n_layers": 2},
    "TFNO": {"n_modes": (6, 6), "in_channels": 1, "out_channels": 1, "hidden_channels": 8, "n_layers": 2},
    "UNO": {
        "in_channels": 1, "out_channels": 1, "hidden_channels": 8, "lifting_channels": 8, "projection_channels": 8,
        "n_layers": 3, "uno_out_channels": [8, 8, 8], "uno_n_modes": [[4, 4], [4, 4], [4, 4]],
        "uno_scalings": [[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]], "horizontal_skips_map": {2: 0},
        "channel_mlp_skip": "linear",
    },
}  # fmt: skip
