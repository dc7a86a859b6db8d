"""The reference networks: shapes, tasks, published parameter counts, and small versions of the same topology."""

from __future__ import annotations

from typing import Any

from convmesh.models.reference import Reference
from convmesh.models.task import Task

TORCHVISION = "torchvision model documentation"
LAYER_TABLE = "sum over the published layer table"
PARTLY_PUBLISHED = "sum over this layer table, whose first and last layers the paper gives"
IMAGENET = Task("class", 1000)
COSMOLOGY = Task("values", 4)
NARROW = {"filters": 4, "added": 0.2}
"""Residual networks whose blocks add little at first: with so few channels rounding errors would explode."""

SMALL_SWIN = {"heads": (2, 2, 4, 4), "blocks": (2, 2, 1, 1)}


def _imagenet(name: str, module: str, parameters: int, /, **options: Any) -> Reference:
    factory = options.pop("factory", name.replace("-", "_"))
    defaults: dict[str, Any] = {
        "sample": (3, 224, 224),
        "task": IMAGENET,
        "source": TORCHVISION,
        "small_sample": (3, 64, 64),
    }
    sizes = {"classes": 10, **options.pop("small_sizes")}
    path = f"convmesh.models.{module}"
    return Reference(
        name=name, module=path, factory=factory, parameters=parameters, small_sizes=sizes, **{**defaults, **options}
    )


def _scientific(name: str, module: str, parameters: int, /, **options: Any) -> Reference:
    factory = options.pop("factory", name.replace("-", "_"))
    details = {"source": LAYER_TABLE, **options}
    return Reference(name=name, module=f"convmesh.models.{module}", factory=factory, parameters=parameters, **details)


CLASSIFIERS = (
    _imagenet("alexnet", "alexnet", 61_100_840, small_sizes={"width": 1 / 16, "pooled": 1, "dropout": 0.0}),
    _imagenet("vgg16", "vgg", 138_357_544, small_sizes={"width": 1 / 16, "pooled": 2, "dropout": 0.0}),
    _imagenet("resnet18", "resnet", 11_689_512, small_sizes=NARROW),
    _imagenet("resnet50", "resnet", 25_557_032, small_sizes=NARROW),
    _imagenet("resnet152", "resnet", 60_192_808, small_sizes=NARROW),
    _imagenet("wide-resnet", "resnet", 68_883_240, factory="wide_resnet50_2", small_sizes=NARROW),
    _imagenet(
        "inception3",
        "inception",
        23_834_568,
        source="torchvision's inception_v3 without its auxiliary classifier",
        sample=(3, 299, 299),
        small_sizes={"width": 1 / 16, "dropout": 0.0},
        small_sample=(3, 160, 139),
        small_batch=8,
        small_rate=1e-5,
    ),
    _imagenet(
        "mobilenet-v2", "mobilenet", 3_504_872, small_sizes={"width": 0.25, "top": 32, "dropout": 0.0}, small_batch=8
    ),
    _imagenet("densenet121", "densenet", 7_978_856, small_sizes={"growth": 4, "filters": 8}),
    _imagenet("convnext-tiny", "convnext", 28_589_128, small_sizes={"filters": 4}),
    _imagenet(
        "vit",
        "vit",
        86_567_656,
        small_sizes={"extent": 32, "patch": 8, "features": 16, "heads": 4, "blocks": 2},
        small_sample=(3, 32, 32),
    ),
    _imagenet(
        "swin",
        "swin",
        28_288_354,
        small_sizes={"extent": 32, "patch": 2, "window": 4, "features": 8, **SMALL_SWIN},
        small_sample=(3, 32, 32),
    ),
)

SCIENTIFIC = (
    _scientific(
        "lenet5",
        "lenet",
        61_706,
        sample=(1, 32, 32),
        task=Task("class", 10),
        small_sample=(1, 32, 32),
        small_batch=8,
    ),
    _scientific(
        "unet2d",
        "unet",
        31_030_658,
        sample=(1, 512, 512),
        task=Task("class per voxel", 2),
        small_sizes={"filters": 4},
        small_sample=(1, 64, 48),
    ),
    _scientific(
        "unet3d",
        "unet",
        31_190_243,
        sample=(1, 128, 128, 128),
        task=Task("class per voxel", 3),
        small_sizes={"filters": 4, "most_filters": 20, "levels": 5},
        small_sample=(1, 32, 16, 32),
    ),
    _scientific(
        "vnet",
        "vnet",
        65_175_314,
        sample=(1, 128, 128, 64),
        task=Task("class per voxel", 2),
        small_sizes={"filters": 2},
        small_sample=(1, 32, 16, 16),
    ),
    _scientific(
        "cosmoflow",
        "cosmoflow",
        8_907_556,
        sample=(4, 128, 128, 128),
        task=COSMOLOGY,
        small_sizes={"width": 1 / 16, "extent": 32, "dropout": 0.0},
        small_sample=(4, 32, 32, 32),
        small_rate=1e-3,
    ),
    _scientific(
        "cosmoflow-256",
        "cosmoflow",
        2_131_252,
        sample=(4, 256, 256, 256),
        task=COSMOLOGY,
        small_sizes={"width": 1 / 32, "skipped": 3, "dropout": 0.0},
        small_sample=(4, 32, 32, 32),
    ),
    _scientific(
        "cosmoflow-512",
        "cosmoflow",
        2_131_252,
        sample=(4, 512, 512, 512),
        task=COSMOLOGY,
        small_sizes={"width": 1 / 32, "skipped": 3, "dropout": 0.0},
        small_sample=(4, 31, 31, 31),
    ),
    _scientific(
        "cosmoflow-bn",
        "cosmoflow",
        9_439_652,
        sample=(4, 512, 512, 512),
        task=COSMOLOGY,
        small_sizes={"width": 1 / 8, "extent": 36, "layers": 4, "dropout": 0.0},
        small_sample=(4, 36, 36, 36),
    ),
    _scientific(
        "deepcam",
        "deepcam",
        56_454_720,
        sample=(16, 768, 1152),
        task=Task("class per voxel", 3),
        small_sizes={"channels": 4, "width": 1 / 64},
        small_sample=(4, 64, 48),
    ),
    _scientific(
        "meshnet",
        "meshnet",
        9_945_858,
        source=PARTLY_PUBLISHED,
        sample=(18, 1024, 1024),
        task=Task("class per voxel", 2, coarser=64),
        small_sizes={"channels": 4, "filters": (4, 6, 8, 10, 12, 4)},
        small_sample=(4, 256, 128),
    ),
    _scientific(
        "meshnet-2k",
        "meshnet",
        16_881_922,
        source=PARTLY_PUBLISHED,
        sample=(18, 2048, 2048),
        task=Task("class per voxel", 2, coarser=64),
        small_sizes={"channels": 4, "filters": (4, 6, 8, 10, 12, 4)},
        small_sample=(4, 256, 128),
        small_rate=3e-5,
    ),
)

FORECASTERS = (
    Reference(
        name="convlstm",
        module="convmesh.models.convlstm",
        factory="convlstm",
        parameters=7_585_296,
        source="Shi et al. 2015, table 1",
        sample=(10, 64, 64),
        task=Task("frames", 10),
        small_sample=(3, 32, 24),
        small_sizes={"frames": 3, "predicted": 2, "patch": 2, "filters": (4, 2, 2), "kernel": 3},
    ),
)

LANGUAGE = (
    Reference(
        name="gpt",
        module="convmesh.models.gpt",
        factory="gpt",
        parameters=124_439_808,
        source="GPT-2's smallest published weights",
        sample=(1024,),
        task=Task("class per word", 50257),
        small_sample=(33,),
        small_sizes={"vocabulary": 37, "length": 33, "features": 16, "heads": 4, "blocks": 2},
    ),
)

REFERENCES = CLASSIFIERS + SCIENTIFIC + FORECASTERS + LANGUAGE
