"""Published layer tables: the output of each stage for one sample. On the meta device, so sizes do not matter."""

import pytest
import torch

from convmesh.models import create, find, names
from convmesh.models.sizes import layer_sizes, output_shapes

TABLES: dict[str, dict[str, tuple[int, ...]]] = {
    "alexnet": {"stage1": (64, 27, 27), "stage2": (192, 13, 13), "stage3": (256, 6, 6), "dense1": (4096,)},
    "vgg16": {"stage1": (64, 112, 112), "stage3": (256, 28, 28), "stage5": (512, 7, 7), "dense2": (4096,)},
    "resnet18": {"stem": (64, 56, 56), "stage2": (128, 28, 28), "stage4": (512, 7, 7), "head": (1000,)},
    "resnet50": {"stage1": (256, 56, 56), "stage2": (512, 28, 28), "stage3": (1024, 14, 14), "stage4": (2048, 7, 7)},
    "resnet152": {"stage2.7": (512, 28, 28), "stage3.35": (1024, 14, 14), "stage4.2": (2048, 7, 7)},
    "wide-resnet": {"stage1.0.body.1": (128, 56, 56), "stage4.0.body.1": (1024, 7, 7), "stage4": (2048, 7, 7)},
    "inception3": {
        "stem.2": (192, 71, 71),
        "stem": (192, 35, 35),
        "body.mixed1": (256, 35, 35),
        "body.mixed3": (288, 35, 35),
        "body.shrink1": (768, 17, 17),
        "body.mixed7": (768, 17, 17),
        "top.shrink2": (1280, 8, 8),
        "top.mixed9": (2048, 8, 8),
    },
    "mobilenet-v2": {"stem": (32, 112, 112), "stage2": (24, 56, 56), "stage5": (96, 14, 14), "top": (1280, 7, 7)},
    "densenet121": {
        "stem": (64, 56, 56),
        "dense1": (256, 56, 56),
        "transition1": (128, 28, 28),
        "transition2": (256, 14, 14),
        "dense3": (1024, 14, 14),
        "dense4": (1024, 7, 7),
    },
    "convnext-tiny": {"stem": (96, 56, 56), "stage2": (192, 28, 28), "stage3": (384, 14, 14), "stage4": (768, 7, 7)},
    "unet3d": {
        "enter": (32, 128, 128, 128),
        "down.3": (320, 8, 8, 8),
        "down.4": (320, 4, 4, 4),
        "up.1": (256,) + (16,) * 3,
    },
    "vnet": {
        "left.0": (16, 128, 128, 64),
        "left.4": (256, 8, 8, 4),
        "right.0": (256, 16, 16, 8),
        "right.3": (32, 128, 128, 64),
    },
    "cosmoflow": {"convolutions.0": (32, 64, 64, 64), "convolutions.4": (512, 4, 4, 4), "dense.0": (128,)},
    "cosmoflow-256": {
        "convolutions.0": (16, 128, 128, 128),
        "convolutions.2": (64, 32, 32, 32),
        "convolutions.3": (128, 8, 8, 8),
        "convolutions.4": (256, 4, 4, 4),
        "convolutions.5": (256, 2, 2, 2),
        "convolutions.6": (128, 1, 1, 1),
        "dense.0": (2048,),
    },
    "cosmoflow-512": {
        "convolutions.0.0": (16, 510, 510, 510),
        "convolutions.1": (32, 126, 126, 126),
        "convolutions.2.0": (64, 62, 62, 62),
        "convolutions.3": (128, 14, 14, 14),
        "convolutions.5.0": (256, 5, 5, 5),
        "convolutions.6": (128, 1, 1, 1),
    },
    "cosmoflow-bn": {"convolutions.0": (16, 256, 256, 256), "convolutions.6": (256, 2, 2, 2), "dense.0": (2048,)},
    "deepcam": {
        "enter": (64, 384, 576),
        "low": (128, 192, 288),
        "middle": (728, 48, 72),
        "exit": (2048, 48, 72),
        "pyramid": (256, 48, 72),
        "rise": (256, 192, 288),
    },
    "meshnet": {"block1": (128, 512, 512), "block5": (384, 32, 32), "block6": (128, 16, 16)},
    "meshnet-2k": {"block1": (128, 1024, 1024), "block5": (384, 64, 64), "block6": (128, 32, 32)},
}


@pytest.mark.parametrize("name", TABLES)
def test_layers_have_the_published_shapes(name: str) -> None:
    with torch.device("meta"):
        shapes = output_shapes(create(name), find(name).sample)
    assert {layer: shapes[layer] for layer in TABLES[name]} == TABLES[name]


@pytest.mark.parametrize("name", names())
def test_the_output_fits_the_task(name: str) -> None:
    reference = find(name)
    with torch.device("meta"):
        output = output_shapes(create(name), reference.sample)[""]
    _, *target = reference.task.target_shape((1, *reference.sample))
    if reference.task.kind == "frames":
        assert output == (*target,)
    else:
        space = [] if reference.task.kind == "values" else target
        assert output == (reference.task.count, *space)


def test_lenet_has_1790_values_per_sample_and_35_times_as_many_weights() -> None:
    rows = layer_sizes(create("lenet5"), (1, 32, 32))
    assert [(row.name, row.data, row.parameters) for row in rows] == [
        ("conv1", 1176, 156),
        ("conv2", 400, 2416),
        ("conv3", 120, 48120),
        ("dense", 84, 10164),
        ("output", 10, 850),
    ]
    data, model = sum(row.data for row in rows), sum(row.parameters for row in rows)
    assert data == 1790
    # So up to about 35 nodes, broadcasting every layer's data sends less than the whole model once.
    assert 34 < model / data < 35


def test_unet2d_without_padding_equals_the_papers() -> None:
    with torch.device("meta"):
        shapes = output_shapes(create("unet2d", padded=False), (1, 572, 572))
    assert shapes["enter"] == (64, 568, 568)
    assert shapes["down.3"] == (1024, 28, 28)
    assert [shapes[f"up.{i}"][-1] for i in range(4)] == [52, 100, 196, 388]
    assert shapes[""] == (2, 388, 388)


def test_unet3d_takes_levels_filters_and_dims() -> None:
    with torch.device("meta"):
        shapes = output_shapes(create("unet3d", levels=2, filters=8, dims=2, norm="group"), (1, 64, 32))
    assert shapes["down.0"] == (16, 32, 16)
    assert shapes[""] == (3, 64, 32)


@pytest.mark.parametrize("extent", [128, 256, 512])
def test_cosmoflow_of_oyama_shrinks_every_cube_to_two_voxels(extent: int) -> None:
    with torch.device("meta"):
        shapes = output_shapes(create("cosmoflow-bn", extent=extent), (4, extent, extent, extent))
    layers = {128: 5, 256: 6, 512: 7}[extent]
    assert shapes["convolutions"] == (256, 2, 2, 2)
    assert f"convolutions.{layers - 1}" in shapes
    assert f"convolutions.{layers}" not in shapes


def test_deepcam_at_output_stride_8() -> None:
    with torch.device("meta"):
        shapes = output_shapes(create("deepcam", output_stride=8), (16, 768, 1152))
    assert shapes["exit"] == (2048, 96, 144)
    assert shapes[""] == (3, 768, 1152)


def test_inception_with_its_auxiliary_classifier_returns_both_outputs_only_in_training() -> None:
    with torch.device("meta"):
        net = create("inception3", auxiliary=True)
        x = torch.empty(2, 3, 299, 299)
        assert [tuple(y.shape) for y in net(x)] == [(2, 1000), (2, 1000)]
        assert tuple(net.eval()(x).shape) == (2, 1000)
