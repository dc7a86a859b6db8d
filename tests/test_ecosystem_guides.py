"""Guides to other packages' training loops, and an example for accelerate, run as printed with the real packages.

Each skips where its package is missing; `make test-ecosystem` has them all.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def run(command: str, folder: Path) -> str:
    """A command as printed, with this Python and this convmesh."""
    prepare = Path(sys.executable).with_name("nnUNetv2_plan_and_preprocess")
    modules = {"torchrun": ["-m", "torch.distributed.run"], "convmesh": ["-m", "convmesh"], "python": []}
    modules[prepare.name] = [str(prepare)]
    program, *rest = shlex.split(command)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, *modules[program], *rest]
    done = subprocess.run(line, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def unpacked(guide: str, folder: Path) -> list[str]:
    """Write a guide's files, and return its commands."""
    text = (ROOT / "docs" / "guides" / guide).read_text(encoding="utf-8")
    for name, content in re.findall(r"^```(?:py|toml)\n# (\S+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        (folder / name).write_text(content, encoding="utf-8")
    return re.findall(r"^    ((?:convmesh|python|torchrun|nnUNetv2_plan_and_preprocess) .*)$", text, re.MULTILINE)


def test_monais_trainer_learns_on_two_ranks(tmp_path: Path) -> None:
    needs("monai", "ignite")
    doctor, _verify, train = unpacked("monai.md", tmp_path)  # other tests verify often
    assert "mynet:unet can be split: by data, spatial, filter, channel." in run(doctor, tmp_path)
    found = re.search(r"loss ([\d.]+) to ([\d.]+), dice ([\d.]+)", run(train, tmp_path))
    assert found is not None
    before, after, dice = map(float, found.groups())
    assert after < 0.8 * before
    assert dice > 0.5


def test_accelerates_loop_trains_as_one_process(tmp_path: Path) -> None:
    needs("accelerate")
    example = ROOT / "examples" / "accelerate_loop.py"
    split = run(f"torchrun --nproc-per-node 2 {example}", tmp_path)
    whole = run(f"python {example}", tmp_path)
    assert split == whole
    assert re.fullmatch(r"loss 0\.\d+ to 0\.\d+\n", split)


def test_nnunets_trainer_trains_as_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("nnunetv2")
    monkeypatch.setenv("nnUNet_raw", "nnUNet_raw")
    monkeypatch.setenv("nnUNet_preprocessed", "nnUNet_preprocessed")
    make, prepare, train = unpacked("nnunet_trainer.md", tmp_path)
    for command in (make, prepare):
        run(command, tmp_path)
    told = [run(command, tmp_path) for command in (train, train.replace("node 2", "node 1"))]
    split, whole = ([float(number) for number in re.findall(r"train_loss (-?[\d.]+)", text)] for text in told)
    assert len(whole) == 2
    assert split == pytest.approx([whole[0], whole[0], whole[1], whole[1]], abs=2e-3)  # both ranks tell
