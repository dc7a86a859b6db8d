"""`convmesh validate` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.command import convmesh

RUNS = """id,role,system,gpus,model,precision,strategy,global_batch,step_ms,contaminated,source
a,anchor,dgx2,1,resnet18,fp32,data=1,64,50.0,,somebody
b,test,dgx2,4,resnet18,fp32,data=4,256,52.0,,somebody
c,test,dgx2,4,resnet18,fp32,"data=2,spatial=2",128,40.0,yes,somebody
"""


def test_tables_and_json(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(RUNS)
    shown = convmesh("validate", "runs.csv", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "ParaDL published" in shown.stdout
    assert "96.10 %" in shown.stdout
    assert "86.74 %" in shown.stdout
    plain = json.loads(convmesh("validate", "runs.csv", "--json", folder=tmp_path).stdout)
    assert [row["id"] for row in plain["rows"]] == ["b", "c"]
    assert plain["accuracy"] == plain["rows"][0]["accuracy"] == plain["by_strategy"]["data"]
    assert plain["accuracy"] > 0.8
    assert plain["accuracy_all"] != plain["accuracy"]


def test_bad_files_are_refused_with_row_and_column(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(RUNS.replace("resnet18", "resnet19", 1).replace("52.0", "-52"))
    refused = convmesh("validate", "runs.csv", folder=tmp_path)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "row 2, column `model` (='resnet19')" in refused.stderr
    assert "row 3, column `step_ms`" in refused.stderr
    assert convmesh("validate", "none.csv", folder=tmp_path).returncode == 2
