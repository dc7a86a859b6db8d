"""Parameter counts: the published ones, and those of published layer tables summed here by hand."""

import itertools

import pytest
import torch
from torch import nn

from convmesh.models import create, find, names


def on_meta(name: str, **sizes: object) -> nn.Module:
    with torch.device("meta"):
        return create(name, **sizes)


def count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize("name", names())
def test_a_network_has_the_parameters_it_is_catalogued_with(name: str) -> None:
    net = on_meta(name)
    assert count(net) == find(name).parameters
    assert all(tensor.is_meta for tensor in (*net.parameters(), *net.buffers()))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("alexnet", 61_100_840),
        ("vgg16", 138_357_544),
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("resnet152", 60_192_808),
        ("wide_resnet50_2", 68_883_240),
        ("inception3", 23_834_568),
        ("mobilenet_v2", 3_504_872),
        ("densenet121", 7_978_856),
        ("convnext_tiny", 28_589_128),
        ("vit", 86_567_656),
        ("swin", 28_288_354),
    ],
)
def test_image_networks_have_the_published_counts(name: str, parameters: int) -> None:
    assert find(name).parameters == parameters


def test_gpt_of_the_paper() -> None:
    block = 2 * 2 * 768 + dense(768, 3 * 768) + dense(768, 768) + dense(768, 4 * 768, 768)
    assert find("gpt").parameters == (50257 + 1024) * 768 + 12 * block + 2 * 768
    assert count(on_meta("gpt", tied=False)) == find("gpt").parameters + 50257 * 768


def convlstm_cell(channels: int, filters: int) -> int:
    """5×5 convolutions of input and state to four gates, a bias for each, and three weights from the cell."""
    return 4 * filters * (channels + filters) * 25 + 4 * filters + 3 * filters


def test_convlstm_of_the_paper() -> None:
    """Table 1: one, two and three layers; the last is the catalogue's."""
    published = {(256,): 13_524_496, (128, 128): 10_042_896, (128, 64, 64): 7_585_296}
    for filters, parameters in published.items():
        assert count(on_meta("convlstm", filters=filters)) == parameters
    read = convlstm_cell(16, 128) + convlstm_cell(128, 64) + convlstm_cell(64, 64)
    made = convlstm_cell(0, 64) + convlstm_cell(64, 64) + convlstm_cell(64, 128)
    assert find("convlstm").parameters == read + made + dense(256, 16)


def test_inception_with_its_auxiliary_classifier() -> None:
    assert count(on_meta("inception3", auxiliary=True)) == 27_161_264


def dense(*sizes: int) -> int:
    return sum(n * f + f for n, f in itertools.pairwise(sizes))


def conv(*rows: tuple[int, int, int], bias: bool = True) -> int:
    """Rows of channels, filters and the kernel's volume."""
    return sum(n * f * k + f * bias for n, f, k in rows)


def test_cosmoflow_of_mlperf() -> None:
    filters = [4, 32, 64, 128, 256, 512]
    body = conv(*((n, f, 27) for n, f in itertools.pairwise(filters)))
    assert find("cosmoflow").parameters == body + dense(512 * 4**3, 128, 64, 4)


@pytest.mark.parametrize("name", ["cosmoflow-256", "cosmoflow-512"])
def test_cosmoflow_of_paradl(name: str) -> None:
    rows = [(4, 16, 27), (16, 32, 27), (32, 64, 27), (64, 128, 27), (128, 256, 8), (256, 256, 8), (256, 128, 8)]
    assert find(name).parameters == conv(*rows) + dense(128, 2048, 256, 4)


def test_cosmoflow_of_oyama_has_nine_million_parameters() -> None:
    filters = [4, 16, 32, 64, 128, 256, 256, 256]
    body = conv(*((n, f, 27) for n, f in itertools.pairwise(filters)), bias=False)
    assert find("cosmoflow-bn").parameters == body + 2 * sum(filters[1:]) + dense(256 * 2**3, 2048, 256, 4)
    assert round(find("cosmoflow-bn").parameters / 1e6, 2) == 9.44


def test_unet3d_of_mlperf() -> None:
    filters = [32, 64, 128, 256, 320, 320]
    pairs = list(itertools.pairwise(filters))
    down = [(1, 32), (32, 32), *((n, f) for a, f in pairs for n in (a, f))]
    up = [(n, f) for f, _ in reversed(pairs) for n in (2 * f, f)]
    units = sum(27 * n * f + 2 * f for n, f in down + up)
    assert find("unet3d").parameters == units + conv(*((n, f, 8) for f, n in pairs)) + conv((32, 3, 1))


def test_unet2d_of_the_paper() -> None:
    filters = [64, 128, 256, 512, 1024]
    pairs = list(itertools.pairwise(filters))
    down = conv((1, 64, 9), (64, 64, 9), *((n, f, 9) for a, f in pairs for n in (a, f)))
    up = conv(*((n, f, 4) for f, n in pairs), *((n, f, 9) for f, _ in pairs for n in (2 * f, f)))
    assert find("unet2d").parameters == down + up + conv((64, 2, 1))


def test_vnet_of_the_paper() -> None:
    left = [(1, 16, 1), (32, 32, 2), (64, 64, 3), (128, 128, 3), (256, 256, 3)]
    right = [(256, 256, 3), (128, 128, 3), (64, 64, 2), (32, 32, 1)]
    stages = sum(conv((n, f, 125)) + (count - 1) * conv((f, f, 125)) + count * f for n, f, count in left + right)
    resizes = [(16, 32), (32, 64), (64, 128), (128, 256), (256, 128), (256, 64), (128, 32), (64, 16)]
    assert find("vnet").parameters == stages + sum(conv((n, f, 8)) + f for n, f in resizes) + conv((32, 2, 1))


@pytest.mark.parametrize(("name", "convolutions"), [("meshnet", 3), ("meshnet-2k", 5)])
def test_meshnet_has_six_blocks(name: str, convolutions: int) -> None:
    filters = [18, 128, 192, 256, 320, 384, 128]
    pairs = list(itertools.pairwise(filters))
    first = conv(*((n, f, 25 if n == 18 else 9) for n, f in pairs), bias=False)
    others = (convolutions - 1) * conv(*((f, f, 9) for f in filters[1:]), bias=False)
    assert find(name).parameters == first + others + convolutions * 2 * sum(filters[1:]) + conv((128, 2, 1))


def separable(*widths: int) -> int:
    return sum(9 * n + n * f for n, f in itertools.pairwise(widths))


def xception(*widths: int, more: bool = False) -> int:
    """Separable convolutions with norms, one more without, and a projection if the channels change."""
    first, last = widths[0], widths[-1]
    tail = separable(last, last) if more else 0
    return separable(*widths) + 2 * sum(widths[1:]) + tail + (first * last + 2 * last if first != last else 0)


def test_deepcam_of_mlperf() -> None:
    enter = conv((16, 32, 9), (32, 64, 9), bias=False) + 2 * (32 + 64)
    first = xception(64, 128, 128, more=True) + xception(128, 256, 256, more=True) + xception(256, 728, 728, more=True)
    middle = 16 * xception(728, 728, 728, 728)
    leave = xception(728, 728, 1024, more=True) + separable(1024, 1536, 1536, 2048) + 2 * (1536 + 1536 + 2048)
    views = conv((2048, 256, 1), *[(2048, 256, 9)] * 3, bias=False) + 4 * 512
    pyramid = views + 2048 * 256 + 512 + 1280 * 256 + 512
    skip = 128 * 48 + 96
    rise = 2 * (256 * 256 * 9 + 512)
    decode = conv((304, 256, 9), (256, 256, 9), bias=False) + 1024 + conv((256, 256, 1))
    out = 256 * 256 * 9 + 512 + 256 * 3 * 9
    assert find("deepcam").parameters == enter + first + middle + leave + pyramid + skip + rise + decode + out
