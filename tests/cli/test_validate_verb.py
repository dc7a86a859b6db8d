"""`convmesh validate` as a user calls it, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convmesh.cli import main

RUNS = """id,role,system,gpus,model,precision,strategy,global_batch,step_ms,contaminated,source
a,anchor,dgx2,1,resnet18,fp32,data=1,64,50.0,,somebody
b,test,dgx2,4,resnet18,fp32,data=4,256,52.0,,somebody
c,test,dgx2,4,resnet18,fp32,"data=2,spatial=2",128,40.0,yes,somebody
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def test_tables_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs.csv").write_text(RUNS)
    assert main(["validate", "runs.csv"]) == 0
    shown = capsys.readouterr().out
    assert "ParaDL published" in shown
    assert "96.10 %" in shown
    assert "86.74 %" in shown
    assert main(["validate", "runs.csv", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in plain["rows"]] == ["b", "c"]
    assert plain["accuracy"] == plain["rows"][0]["accuracy"] == plain["by_strategy"]["data"]
    assert plain["accuracy"] > 0.8
    assert plain["accuracy_all"] != plain["accuracy"]


def test_bad_files_are_refused_with_row_and_column(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs.csv").write_text(RUNS.replace("resnet18", "resnet19", 1).replace("52.0", "-52"))
    assert main(["validate", "runs.csv"]) == 2
    refused = capsys.readouterr().err
    assert "Traceback" not in refused
    assert "row 2, column `model` (='resnet19')" in refused
    assert "row 3, column `step_ms`" in refused
    assert main(["validate", "none.csv"]) == 2
