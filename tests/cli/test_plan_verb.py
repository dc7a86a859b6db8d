"""`convmesh plan`: tables, JSON, the saved plan, and bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import convmesh as cm
from convmesh.cli import main as command
from convmesh.cli.captured_subjects import captured_for, subject_without_data
from convmesh.cli.exits import Exit

LENET = ["plan", "lenet5", "--batch", "64", "--gpus", "4", "--system", "dgx-a100"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_json_is_what_other_tools_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*LENET, "--json"]) == Exit.DONE
    shown = json.loads(capsys.readouterr().out)
    assert shown.keys() == {"best", "plans", "rejected"}
    keys = {"strategy", "mesh", "seconds_step", "efficiency", "bytes_memory", "bytes_sent", "joules_step"}
    assert all(row.keys() == keys for row in shown["plans"])
    assert all(row.keys() == {"strategy", "mesh", "reason"} for row in shown["rejected"])
    assert {key: shown["best"][key] for key in keys} == shown["plans"][0]
    times = [row["seconds_step"] for row in shown["plans"]]
    assert times == sorted(times)
    plan = cm.load_plan(folder / "lenet5.plan.toml")
    assert dict(plan.mesh.axes) == shown["best"]["mesh"]
    assert plan.shapes == ((64, 1, 32, 32),)


def test_the_table_names_plans_reasons_rejected_meshes_and_the_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command([*LENET, "--strategies", "data", "pipeline", "filter", "--save", "mine.toml"]) == Exit.DONE
    shown = capsys.readouterr()
    assert "lenet5 64×1×32×32 on 4 × dgx-a100" in shown.out
    assert "data=4" in shown.out
    assert "efficiency" in shown.out
    assert max(map(len, shown.out.splitlines()[1:7])) <= 100
    assert "the next strategy" in shown.out
    assert "plan saved to mine.toml" in shown.out
    assert (folder / "mine.toml").exists()
    assert "filter on 4 ranks ..." in shown.err


def test_rejected_meshes_have_reasons(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del folder
    assert command([*LENET[:3], "3", "--gpus", "4", "--strategies", "data", "filter"]) == Exit.DONE
    assert "data: 4 ranks > 3 samples" in capsys.readouterr().out


def test_networks_for_cubes_are_built_for_the_given_extent() -> None:
    subject = subject_without_data("cosmoflow", "4x64x64x64")
    assert captured_for(subject, (2, 4, 64, 64, 64), "float32").graph.inputs[0].outputs[0].shape == (2, 4, 64, 64, 64)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (["plan", "lenet", "--gpus", "2"], Exit.BAD_INPUT, "`model` (='lenet') is unknown. Did you mean lenet5"),
        ([*LENET[:-1], "dgx-a10"], Exit.BAD_INPUT, "Did you mean dgx-a100"),
        (["plan", "lenet5", "--gpus", "0"], Exit.BAD_INPUT, "`--gpus` (=0) must be a positive number"),
        (["plan", "lenet5", "--gpus", "2", "--batch", "0"], Exit.BAD_INPUT, "`--batch` (=0) must be"),
        (["plan", "lenet5", "--gpus", "9999", "--system", "abci"], Exit.BAD_INPUT, "is more than the 4352 devices"),
        (["plan", "lenet5", "--gpus", "2000000"], Exit.BAD_INPUT, "`--gpus` (=2000000) must be at most 1048576"),
        ([*LENET, "--input", "1xx"], Exit.BAD_INPUT, "`--input` (='1xx') must be one sample's shape"),
        ([*LENET, "--objective", "epoch"], Exit.BAD_INPUT, "needs `--samples`"),
        ([*LENET, "--strategies", "dta"], Exit.BAD_INPUT, "`strategies` has 'dta', which is none"),
        ([*LENET[:-1], "abci", "--objective", "cost"], Exit.BAD_INPUT, "needs a price"),
        ([*LENET, "--strategies", "data", "--save", "no/such/plan.toml"], Exit.BAD_INPUT, "No such file"),
        (
            ["plan", "lenet5", "--gpus", "4", "--batch", "2", "--strategies", "data"],
            Exit.NO_PLAN,
            "use fewer ranks, another number or a larger batch:\n  data on Mesh(data=4): data: 4 ranks > 2 samples",
        ),
    ],
)
def test_bad_input_is_one_message(capsys: pytest.CaptureFixture[str], args: list[str], status: Exit, says: str) -> None:
    assert command(args) == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert says in shown.err
    assert "Traceback" not in shown.err


def test_a_users_module_may_import_any_part_of_sympy(folder: Path) -> None:
    """Plans of reference networks leave it out: it takes a third of a second to load."""
    (folder / "symbolic.py").write_text(
        "import sympy.core.numbers\nfrom sympy import Basic, Symbol\nfrom torch import nn\n"
        "assert isinstance(Symbol('x'), Basic)\n"
        "def make():\n    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2))\n"
    )
    plan = ["plan", "symbolic:make", "--input", "1x8x8", "--batch", "8", "--gpus", "2", "--system", "dgx-a100"]
    done = subprocess.run([sys.executable, "-m", "convmesh", *plan], capture_output=True, text=True, check=False)
    assert done.returncode == Exit.DONE, done.stderr
