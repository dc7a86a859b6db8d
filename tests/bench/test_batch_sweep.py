"""The sweep over batch sizes and ranks: real runs, a table, a plot, and a stop in the middle."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from convmesh.bench.batch_sweep import SweepPoint, best
from convmesh.bench.sweep_plot import FIGURES, sweep_svg
from convmesh.cli import main
from convmesh.cli.exits import Exit

RUN_FILE = """
epochs = 1
[data]
source = "digits"
[plan]
strategy = "data"
predict = false
[evaluation]
batch = 100
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return path


def test_a_sweep_trains_each_pair_once(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep"
    args = ["bench", "batch-sweep", str(run_file), "--batches", "400", "800", "--ranks", "1", "--out", str(out)]
    assert main([*args, "--json"]) == Exit.DONE
    points = json.loads(capsys.readouterr().out)
    assert [(point["ranks"], point["batch"]) for point in points] == [(1, 400), (1, 800)]
    assert all(0 < point["accuracy"] <= 1 and point["samples_per_second"] > 0 for point in points)
    before = (out / "ranks-1-batch-400" / "metrics.jsonl").stat().st_mtime_ns
    assert main(args) == Exit.DONE
    shown = capsys.readouterr().out
    assert "most accurate: batch" in shown
    assert (out / "ranks-1-batch-400" / "metrics.jsonl").stat().st_mtime_ns == before
    assert ElementTree.parse(out / "sweep.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere.toml"], "there is no such file"),
        (["run.toml", "--batches", "0"], "must be positive numbers"),
        (["run.toml", "--batches", "9000", "--ranks", "1"], "batch 9000 on 1 ranks ended with status 2"),
    ],
)
def test_mistakes_are_one_message(
    args: list[str], message: str, run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run_file.parent)
    assert main(["bench", "batch-sweep", *args]) == Exit.BAD_INPUT
    assert message in capsys.readouterr().err


def point(ranks: int, batch: int, accuracy: float, seconds: float) -> SweepPoint:
    return SweepPoint(batch, ranks, 1, accuracy, seconds, seconds / 10, 10 * batch / seconds)


def test_the_best_is_the_most_accurate_and_of_those_the_fastest() -> None:
    points = [point(1, 10, 0.97, 3.0), point(2, 10, 0.98, 4.0), point(4, 10, 0.98, 2.0)]
    assert best(points) is points[2]


def test_the_plot_has_a_line_for_each_number_of_ranks_in_each_panel() -> None:
    points = [point(ranks, batch, 0.9, 1.0 + batch / ranks) for ranks in (1, 2, 4) for batch in (10, 100, 800)]
    lines = ElementTree.fromstring(sweep_svg(points)).iter("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [3] * 3 * len(FIGURES)
