"""`convmesh train` as people run it: files and flags, local ranks, torchrun, signals, resume, mistakes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from convmesh.cli.main import main
from convmesh.train.config_files import load_config
from convmesh.train.training import train_run
from tests.conftest import Pools

ROOT = Path(__file__).parents[2]
RUN = """
batch = 8
epochs = 40
precision = "fp64"
model.name = "lenet5"
data.source = "digits"
data.args = { samples = 64 }
data.test_args = { samples = 20 }
plan.strategy = "data"
plan.predict = false
"""


def written(folder: Path, text: str = RUN) -> str:
    (folder / "run.toml").write_text(text, encoding="utf-8")
    return str(folder / "run.toml")


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return found


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def trained(path: str, steps: int, folder: Path) -> None:
    train_run(load_config(path).model_copy(update={"steps": steps}), folder)


def test_sigterm_saves_and_torchrun_goes_on(tmp_path: Path, pools: Pools) -> None:
    """Two local ranks are told to stop after their first step; two ranks of torchrun finish what one process would."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "convmesh", "train", written(tmp_path), "--run", str(run), "--ranks", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    first = process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    told, errors = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGTERM, first + errors
    assert "stopped by signal 15, saved" in told
    done = summary(run)["steps"]
    assert 1 <= done < 320
    assert (run / "checkpoints" / str(done)).is_dir()

    last = str(done + 4)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--", "convmesh"]
    options = ["train", written(tmp_path), "--run", str(run), "--resume", "--steps", last, "--plan.strategy", "spatial"]
    again = subprocess.run([*torchrun, *options], capture_output=True, text=True, timeout=600, check=False)
    assert again.returncode == 0, again.stderr
    assert (summary(run)["steps"], summary(run)["restarts"], summary(run)["mesh"]) == (done + 4, 1, {"height": 2})

    pools[1].run(trained, written(tmp_path), done + 4, tmp_path / "alone")
    assert losses(run) == pytest.approx(losses(tmp_path / "alone"), rel=1e-9)


@pytest.mark.parametrize(
    ("text", "flags", "told"),
    [
        ("batsh = 3", [], "`batsh` is unknown; did you mean `batch`?"),
        (RUN, ["--batch", "9", "--accumulate", "2"], "`accumulate` (=2) must divide `batch` (=9)"),
        (RUN, ["--ranks", "0"], "`--ranks` (=0) must be a positive number"),
        (RUN, ["--seed", "-1"], "the command line: `seed` (=-1) must be greater than or equal to 0."),
        (RUN, ["--steps", "-1", "--batch", "0"], "the command line has 2 mistakes:\n  `batch` (=0) must be greater"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    text: str, flags: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", written(tmp_path, text), *flags]) == 2
    assert told in capsys.readouterr().err


def test_mistakes_in_flags_of_sections_are_told_at_once_in_our_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", written(tmp_path), "--optimizer.lr=-1", "--plan.mesh", "dat=2", "--batch", "0"]) == 2
    heading, *told = capsys.readouterr().err.splitlines()
    assert heading == "convmesh: the command line has 3 mistakes:"
    assert told[0] == "  `batch` (=0) must be greater than or equal to 1."
    assert told[1].endswith("did you mean data?")
    assert told[2] == "  `optimizer.lr` (=-1.0) must be greater than 0."


@pytest.mark.parametrize("flag", ["--optimizer.lr=fast", "--optimizer.momentm=1", "--precision=fp8"])
def test_flags_are_checked_like_the_file(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", written(tmp_path), flag])
    assert caught.value.code == 2
    assert flag.split("=")[0].lstrip("-").split(".")[-1] in capsys.readouterr().err


def test_mistakes_that_ranks_meet_end_in_one_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A dataset that is not there, on two ranks: exit status 2, no traceback, and the run folder is free again."""
    wrong = RUN.replace('"digits"', '"missing.h5"').replace("data.args = { samples = 64 }", "")
    assert main(["train", written(tmp_path, wrong), "--run", str(tmp_path / "run"), "--ranks", "2"]) == 2
    told = capfd.readouterr().err
    assert told.count("`data.source`: 'missing.h5': there is no such file or folder") == 1
    assert "Traceback" not in told


def test_a_function_stands_in_for_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (
        "from convmesh import RunConfig",
        "mine = lambda: RunConfig(batch=6, accumulate=4)",
        "no = lambda: 3",
        "bad = lambda: [][1]",
        "wrong = lambda: RunConfig(batch=0, epochz=3)",
        "section = lambda: type(RunConfig().optimizer)(momentm=3)",
    )
    module = "\n".join(lines)
    (tmp_path / "myruns.py").write_text(module, encoding="utf-8")
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        assert main(["train", "myruns:mine"]) == 2
        assert "`accumulate` (=4) must divide `batch` (=6)" in capsys.readouterr().err
        assert main(["train", "myruns:no"]) == 2
        assert "must return a convmesh.RunConfig" in capsys.readouterr().err
        assert main(["train", "myruns:bad"]) == 2
        assert "`myruns:bad` failed: IndexError" in capsys.readouterr().err
        assert main(["train", "myruns:wrong"]) == 2
        told = capsys.readouterr().err
        assert "RunConfig has 2 mistakes:\n  `batch` (=0) must be greater than or equal to 1.\n" in told
        assert "pydantic" not in told
        assert main(["train", "myruns:section"]) == 2
        assert "OptimizerConfig: `momentm` is unknown; did you mean `momentum`?" in capsys.readouterr().err
        assert main(["train", "myruns:mime"]) == 2
        assert "`RUN.TOML` (='myruns:mime'): `myruns` has no 'mime'; did you mean mine?" in capsys.readouterr().err
    finally:
        os.chdir(before)
        sys.path.remove(str(tmp_path))


@pytest.mark.parametrize("places", ["", "node1", ":29400", "node1:x", "node1:29400,", "node1:29400,node2:70000"])
def test_places_that_are_none_are_bad_input(places: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", written(tmp_path), "--ranks", "2", "--hosts", "2", f"--rendezvous={places}"]) == 2
    assert f"`--rendezvous` (={places!r}) must be HOST:PORT" in capsys.readouterr().err
