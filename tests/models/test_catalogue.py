"""Networks by name and by path, and the errors for unknown ones."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from convmesh.errors import ConvMeshError, UnknownNameError
from convmesh.models import create, find, names

PROMISED = {
    *("lenet5", "alexnet", "vgg16", "resnet18", "resnet50", "resnet152", "wide-resnet", "inception3", "mobilenet-v2"),
    *("densenet121", "convnext-tiny", "unet2d", "unet3d", "vnet", "cosmoflow", "cosmoflow-256", "cosmoflow-512"),
    *("deepcam", "meshnet", "vit", "swin", "convlstm", "gpt"),
}


def test_every_promised_network_exists() -> None:
    assert set(names()) >= PROMISED
    assert names() == sorted(names())


@pytest.mark.parametrize("name", ["mobilenet-v2", "mobilenet_v2", "MobileNet_V2"])
def test_hyphens_underscores_and_capitals_are_the_same(name: str) -> None:
    assert find(name).name == "mobilenet-v2"


def test_a_factory_names_its_network_too() -> None:
    assert find("wide_resnet50_2") is find("wide-resnet")


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"`model` \(='resnet-51'\) is unknown. Did you mean resnet50 or"):
        find("resnet-51")
    with pytest.raises(UnknownNameError, match="There are: alexnet, convlstm, convnext-tiny, cosmoflow"):
        create("?")


def test_the_error_is_one_of_ours_and_of_pythons() -> None:
    assert issubclass(UnknownNameError, ConvMeshError)
    assert issubclass(UnknownNameError, LookupError)


def test_an_unknown_size_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"`size` of `resnet18` \(='filter'\) is unknown. Did you mean filters"):
        create("resnet18", filter=4)


def test_an_unknown_norm_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"`norm` \(='bath'\) is unknown. Did you mean batch"):
        create("unet3d", norm="bath")


def test_an_output_stride_that_is_not_published_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"`output_stride` \(=32\) is unknown. There are: 16, 8"):
        create("deepcam", output_stride=32)


def test_a_path_names_any_factory() -> None:
    layer = create("torch.nn:Conv2d", in_channels=2, out_channels=4, kernel_size=3)
    assert isinstance(layer, torch.nn.Conv2d)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no.such.module:net", r"`no.such.module` cannot be imported \(ModuleNotFoundError: No module named 'no'\)"),
        ("torch.nn:Conv2e", r"`model` \(='torch.nn:Conv2e'\): `torch.nn` has no 'Conv2e'; did you mean Conv2d"),
        ("torch.nn:", "has no ''; it has .*Conv2d"),
        ("math:pi", "is a float, which cannot be called"),
        ("collections:OrderedDict", "returned a OrderedDict; it must return an nn.Module"),
        ("torch.nn:Linear", "needs a value for in_features, out_features"),
    ],
)
def test_a_path_that_leads_nowhere_says_where_it_ends(path: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        create(path)


def test_a_module_that_fails_to_load_is_reported_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_network.py").write_text("raise ZeroDivisionError('on purpose')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownNameError, match=r"cannot be imported \(ZeroDivisionError: on purpose\)"):
        create("broken_network:net")


def test_looking_names_up_does_not_load_torch() -> None:
    looked_up = "import sys; from convmesh.models import find, names; [find(n).small() for n in names()]"
    code = f"{looked_up}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
