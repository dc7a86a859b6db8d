"""The guide to nnU-Net's network on NIfTI volumes works as printed: files and commands, in order."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "nnunet.md"
PACKAGE = "dynamic_network_architectures"


SHORT = pytest.param(" --steps 4", 0.0, id="a few steps")
WHOLE = pytest.param("", 0.9, id="as printed", marks=pytest.mark.full)


@pytest.mark.parametrize(("more", "least_dice"), [SHORT, WHOLE])
def test_the_guide_trains_nnunets_network(more: str, least_dice: float, tmp_path: Path) -> None:
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"{PACKAGE} is not installed")
    text = GUIDE.read_text(encoding="utf-8")
    files = re.findall(r"^```(?:py|toml)\n# (\S+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert [name for name, _ in files] == ["make_scans.py", "mynets.py", "scans.toml"]
    for name, content in files:
        (tmp_path / name).write_text(content, encoding="utf-8")
    for command in re.findall(r"^    (convmesh .*|python .*)$", text, re.MULTILINE):
        if not (more and " verify " in command):  # which other tests do often
            run(command + more if " train " in command else command, tmp_path)
    summary = json.loads((tmp_path / "runs/scans/summary.json").read_text(encoding="utf-8"))
    assert summary["eval"]["dice"] > least_dice
    assert summary["mesh"] == {"depth": 2}
    assert load(tmp_path) == "all keys matched"


def run(command: str, folder: Path) -> str:
    program, *rest = shlex.split(command)
    module = [] if program == "python" else ["-m", "convmesh"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    line = [sys.executable, *module, *rest]
    done = subprocess.run(line, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def load(folder: Path) -> str:
    """Whether the exported weights are those of the network on one device."""
    (folder / "load.py").write_text(
        "import mynets\nfrom safetensors.torch import load_file\n"
        "found = mynets.residual_unet().load_state_dict(load_file('weights.safetensors'))\n"
        "print('all keys matched' if not (found.missing_keys or found.unexpected_keys) else found)\n",
        encoding="utf-8",
    )
    return run("python load.py", folder).strip()
