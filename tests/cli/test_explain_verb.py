"""`convmesh explain` as a user runs it."""

from __future__ import annotations

import json

import pytest

from convmesh.cli import main
from convmesh.cli.exits import Exit


def test_the_readmes_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "channel", "--layer", "conv 256x256x3x3 on 8x256x56x56", "--ranks", "4"]) == Exit.DONE
    shown = capsys.readouterr().out
    assert "C 64:128  |BBBBBBBB|" in shown
    assert "the runtime's own program sends 38,535,168 B: as the formulas say" in shown


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "data+spatial", "--system", "dgx-a100", "--json"]) == Exit.DONE
    explanation = json.loads(capsys.readouterr().out)
    assert explanation["mesh"] == {"data": 2, "height": 2}
    assert explanation["agrees"]
    assert explanation["bytes_sent"] == explanation["bytes_formula"]
    assert (
        explanation["prediction"]["seconds_low"]
        <= explanation["prediction"]["seconds_step"]
        <= explanation["prediction"]["seconds_high"]
    )
    assert [phase["phase"] for phase in explanation["phases"]] == ["forward", "backward-data", "reduction"]


def test_a_layer_of_a_reference_network(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["explain", "filter", "--layer", "resnet50:stage3.0.body.1.conv", "--batch", "8", "--ranks", "2", "--json"]
    assert main(args) == Exit.DONE
    explanation = json.loads(capsys.readouterr().out)
    assert explanation["layer"] == "conv 256x256x3x3 on 8x256x28x28 stride 2"
    assert explanation["agrees"]


def test_a_grid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "channel", "--algorithm", "w", "--ranks", "6"]) == Exit.DONE
    assert "stationary-w: filters and channels are cut over a grid" in capsys.readouterr().out


def test_sizes_of_lenet_decide_between_data_and_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "lenet5"]) == Exit.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["conv1", "6×14×14", "1176", "156", "0.13"]
    assert lines[7].split() == ["total", "1790", "61706", "34.47"]
    assert main(["explain", "lenet5", "--json"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out)["data"] == 1790


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["chanel"], "`strategy` (='chanel') is unknown. Did you mean channel"),
        (["lenet"], "Did you mean lenet5"),
        (["data", "--ranks", "0"], "`--ranks` (=0) must be a positive number"),
        (["data", "--batch", "0"], "`--batch` (=0) must be a positive number"),
        (["data", "--ranks", "64"], "has 8 samples to share"),
        (["data", "--layer", "conv 3x3"], "must be a layer such as"),
        (["data", "--layer", "resnet51:stem"], "Did you mean"),
        (["data", "--layer", "resnet50:stage3.0.body.9.conv"], "Did you mean stage3.0.body"),
        (["data", "--layer", "mobilenet-v2:stage2.1.body.1.conv"], "groups"),
        (["spatial", "--layer", "linear 8x8 on 4x8"], "cuts space, but the input has no spatial dims"),
        (["data", "--system", "dgx-a200"], "Did you mean dgx-h200 or dgx-a100"),
        (["data", "--algorithm", "w"], "is for filter and channel, not for data"),
        (["channel", "--algorithm", "w", "--ranks", "3"], "needs a grid of ranks"),
    ],
)
def test_bad_input_is_one_message(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *args]) == Exit.BAD_INPUT
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""


def test_attention(capsys: pytest.CaptureFixture[str]) -> None:
    layer = ["--layer", "attention 4 on 2x64x32", "--ranks", "2"]
    assert main(["explain", "spatial", *layer, "--system", "dgx-a100"]) == Exit.DONE
    shown = capsys.readouterr().out
    assert "ring: keys and values pass round" in shown
    assert "a step takes" in shown
    assert main(["explain", "filter", *layer, "--json"]) == Exit.DONE
    ways = json.loads(capsys.readouterr().out)["ways"]
    assert [*ways] == ["gather"]  # heads are cut, so that nothing of keys and values is sent
    assert ways["gather"]["sent"]["attend.scaled_dot_product_attention"] == [0, 0]
    assert ways["gather"]["parts"]["attend.linear"] == [2, 64, 3, 16]


def test_attention_of_features_that_heads_do_not_divide(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "spatial", "--layer", "attention 3 on 2x64x32"]) == Exit.BAD_INPUT
    assert "32 features do not divide over 3 heads" in capsys.readouterr().err
