"""`convmesh verify` as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.nn.functional as F

import convmesh as cm
from convmesh import models
from convmesh.cli import main
from convmesh.cli.exits import Exit
from convmesh.ops.core import registry
from convmesh.plans.default_mesh import mesh_for
from tests.cli.command import USERS_MODULE, convmesh

KEYS = {
    "ok", "verdict", "mesh", "plan_mesh", "shapes", "plan_shapes", "steps", "seconds", "first", "worst", "layers",
    "losses", "unsupported", "failure", "notes",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with a module of networks."""
    (tmp_path / "mynets.py").write_text(USERS_MODULE)
    return tmp_path


def test_a_users_network_from_the_current_folder_as_a_table(folder: Path) -> None:
    """In a process of its own, with no path set up for it."""
    done = convmesh("verify", "mynets:good", "--ranks", "4", "--input", "1x16x16", "--steps", "1", folder=folder)
    assert done.returncode == Exit.DONE, done.stderr
    assert "exact: 3 layers, 1 steps on Mesh(data=2, height=2) with 4x1x16x16" in done.stdout
    assert "Conv2d" in done.stdout


@pytest.fixture
def plan_file(folder: Path) -> Path:
    net = models.find("lenet5")
    cm.plan(net.create(), (4, *net.sample), cm.Mesh(filter=2), "filter").save(folder / "p.toml")
    return folder / "p.toml"


@pytest.fixture
def inside(plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in the user's folder but in this process, which has torch loaded already; undone afterwards."""
    monkeypatch.chdir(plan_file.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mynets", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))


@pytest.mark.usefixtures("inside")
def test_a_reference_network_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    status = main(["verify", "lenet5", "--ranks", "2", "--steps", "2", "--json"])
    shown = capfd.readouterr()
    assert status == Exit.DONE, shown.err
    result = json.loads(shown.out)
    assert result.keys() == KEYS
    assert result["ok"]
    assert result["mesh"] == {"height": 2}
    assert {"layer", "op", "ok", "output", "gradient", "weight_gradient", "weight"} == result["layers"][0].keys()
    assert len(result["losses"]) == 2
    assert "training on one process" in shown.err


@pytest.mark.usefixtures("inside")
def test_a_plan_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "lenet5", "--ranks", "2", "--steps", "1", "--plan", "p.toml"]) == Exit.DONE
    assert "Mesh(filter=2) with 4x1x32x32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["lenet", "--ranks", "2"], "Did you mean lenet5"),
        (["lenet5", "--ranks", "2", "--input", "1x3y"], "`--input` (='1x3y') must be one sample's shape"),
        (["lenet5", "--ranks", "0"], "`--ranks` (=0) must be a positive number"),
        (["lenet5", "--ranks", "2", "--batch", "0"], "`--batch` (=0)"),
        (["lenet5", "--ranks", "2", "--strategy", "spacial"], "`strategy` (='spacial') must be one of data"),
        (["lenet5", "--ranks", "2", "--plan", "none.toml"], "'none.toml'"),
        (["lenet5", "--ranks", "2", "--input", "1x5x5"], "fails on the sample"),
        (["mynets:good", "--ranks", "2"], "`--input` is needed"),
        (["mynets:best", "--ranks", "2"], "has no 'best'; it has"),
        (["mynets:fails", "--ranks", "2"], "OSError: no weights here"),
        (["mynets:number", "--ranks", "2"], "must return an nn.Module"),
        (["nowhere:net", "--ranks", "2"], "cannot be imported"),
        (
            ["lenet5", "--ranks", "4", "--plan", "p.toml"],
            "`--ranks` (=4) must be the number of ranks of the plan",
        ),
        (["lenet5", "--ranks", "2", "--plan", "p.toml", "--strategy", "data"], "exclude each other"),
        (["mynets:good", "--ranks", "2", "--plan", "p.toml"], "the plan has layer 'conv1.0', but the network has none"),
    ],
)
@pytest.mark.usefixtures("inside")
def test_bad_input_is_one_message(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *args]) == Exit.BAD_INPUT
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.mark.usefixtures("inside")
def test_unsupported_operators_are_all_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "mynets:Sums", "--ranks", "2", "--input", "1x8x8"]) == Exit.BAD_INPUT
    shown = capsys.readouterr().out
    assert shown.count("has no split version") == 2
    assert "cannot run: 2 layers" in shown


@pytest.mark.usefixtures("inside")
def test_an_inexact_plan_has_its_own_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["verify", "mynets:Counts", "--ranks", "2", "--input", "1x8x8", "--json"]
    assert main(args) == Exit.NOT_EXACT
    assert "computes something else each time that it runs" in json.loads(capsys.readouterr().out)["failure"]


@pytest.mark.usefixtures("inside")
def test_a_broken_layer_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    relu = registry.handler_of(F.relu)
    monkeypatch.setitem(registry._handlers, F.relu, lambda x, *rest, **named: relu(x, *rest, **named) * (1 + 1e-6))
    args = ["verify", "mynets:good", "--ranks", "2", "--input", "1x8x8", "--steps", "1"]
    assert main([*args, "--json"]) == Exit.NOT_EXACT
    assert json.loads(capsys.readouterr().out)["first"]["layer"] == "1"
    assert main(args) == Exit.NOT_EXACT
    assert "layer '1': its output differs by 1e-06" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, Exit.INTERRUPTED), (signal.SIGTERM, 143)])
def test_interrupting_ends_all_processes_quietly(number: signal.Signals, status: int) -> None:
    command = [sys.executable, "-m", "convmesh", "verify", "lenet5", "--ranks", "2", "--steps", "1000000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        while "one process" not in process.stderr.readline():
            pass
        process.send_signal(number)
        rest = process.communicate(timeout=120)[1]
    assert process.returncode == status
    assert "Traceback" not in rest
    while is_there(process.pid):  # orphans that have ended are the system's to clear away
        time.sleep(0.01)


def is_there(group: int) -> bool:
    """Whether a process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("strategy", "ranks", "dims", "mesh"),
    [
        ("spatial", 4, 2, cm.Mesh(height=2, width=2)),
        ("spatial", 8, 3, cm.Mesh(depth=2, height=2, width=2)),
        ("spatial", 6, 2, cm.Mesh(height=3, width=2)),
        ("data+spatial", 2, 3, cm.Mesh(depth=2)),
        ("data+spatial", 4, 3, cm.Mesh(data=2, depth=2)),
        ("data+filter", 8, 2, cm.Mesh(data=2, filter=4)),
        ("data", 7, 2, cm.Mesh(data=7)),
        ("channel", 1, 2, cm.Mesh()),
    ],
)
def test_ranks_are_distributed_over_the_axes_of_a_strategy(strategy: str, ranks: int, dims: int, mesh: cm.Mesh) -> None:
    assert mesh_for(strategy, ranks, dims) == mesh
