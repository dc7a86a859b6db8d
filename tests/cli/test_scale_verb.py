"""`convmesh scale`: curves, limits, the plot, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from convmesh.cli import main as command
from convmesh.cli.exits import BadInputError, Exit
from convmesh.cli.scale_verb import parse_counts

LENET = ["scale", "lenet5", "--gpus", "1..8", "--batch", "4", "--strategies", "data", "filter"]


def test_tables_plots_and_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*LENET, "--svg", str(tmp_path / "curves.svg")]) == Exit.DONE
    shown = capsys.readouterr().out
    assert "strong scaling of lenet5 on dgx-a100" in shown
    assert "weak scaling of lenet5 on dgx-a100" in shown
    assert "d data  f filter" in shown
    assert "filter: scales to" in shown
    drawn = ElementTree.parse(tmp_path / "curves.svg").getroot()
    assert sum(part.tag.endswith("polyline") for part in drawn.iter()) == 4


def test_json_has_points_and_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*LENET, "--scaling", "strong", "--json"]) == Exit.DONE
    (data, _) = json.loads(capsys.readouterr().out)["strong"]
    assert data["strategy"] == "data"
    assert [point["ranks"] for point in data["points"]] == [1, 2, 4, 8]
    assert data["points"][-1]["mesh"] is None
    assert data["limit"]["ranks"] <= 4


def test_exits_without_a_feasible_plan_if_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["scale", "unet3d", "--input", "1x512x512x512", "--batch", "1", "--gpus", "1", "--system", "p2-8xlarge"]
    assert command([*large, "--strategies", "data", "--scaling", "strong"]) == Exit.NO_PLAN
    assert "12.0 GiB at layer up.4" in capsys.readouterr().err


def test_counts_are_powers_of_two_and_the_last() -> None:
    assert parse_counts("1..12") == [1, 2, 4, 8, 12]
    assert parse_counts("4") == [1, 2, 4]
    with pytest.raises(BadInputError, match="must rise"):
        parse_counts("8..2")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["scale", "lenet5", "--gpus", "many"], "`--gpus` (='many') must be a number of devices"),
        (
            ["scale", "lenet5", "--gpus", "1..9999", "--system", "abci"],
            "`--gpus` (=9999) is more than the 4352 devices",
        ),
        (["scale", "lenet6", "--gpus", "2"], "Did you mean lenet5"),
        (["scale", "lenet5", "--gpus", "2", "--batch", "-1"], "`--batch` (=-1) must be"),
        (["scale", "lenet5", "--gpus", "2", "--strategies", "dat"], "`--strategies` (='dat') must be among data"),
    ],
)
def test_bad_input_is_one_message(capsys: pytest.CaptureFixture[str], args: list[str], says: str) -> None:
    assert command(args) == Exit.BAD_INPUT
    shown = capsys.readouterr()
    assert says in shown.err
    assert "Traceback" not in shown.err
