"""An untested torch is told once, when the runtime is imported; the range is the same wherever it stands."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from convmesh import parallelize
from convmesh.private_torch.tested_versions import NEWEST, OLDEST, warn_if_untested

ROOT = Path(__file__).parent.parent


def warned(version: str, code: str) -> list[str]:
    """What a process with that torch writes to its error stream."""
    pretended = f"import torch; torch.__version__ = {version!r}; {code}"
    call = [sys.executable, "-W", "default::UserWarning:convmesh", "-c", pretended]
    done = subprocess.run(call, env={**os.environ, "RANK": "0"}, capture_output=True, text=True, check=True)
    return [line for line in done.stderr.splitlines() if "ConvMesh was tested" in line]


def test_the_runtime_tells_once() -> None:
    (line,) = warned("2.10.1", "import convmesh; convmesh.parallelize; import convmesh.runtime")
    assert f"tested with torch 2.{OLDEST[1]} to 2.{NEWEST[1]}; this is torch 2.10.1" in line
    assert "convmesh verify" in line


@pytest.mark.parametrize("version", ["2.10.1", f"2.{NEWEST[1] + 1}.0a0+git1234"])
def test_an_untested_torch_is_told_by_the_first_rank(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another rank a warning would be an error, as everywhere here."""
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match=re.escape(f"this is torch {version}.")):
        warn_if_untested()
    monkeypatch.setenv("RANK", "1")
    warn_if_untested()


def test_nobody_else_is_told() -> None:
    """Nor is this process, in which a warning is an error: its torch was tested."""
    warn_if_untested()
    assert callable(parallelize)
    assert OLDEST <= tuple(map(int, torch.__version__.split(".")[:2])) <= NEWEST
    assert warned("2.99.0", "import sys; sys.argv = ['convmesh', 'plan']; import convmesh.cli") == []


def test_the_pin_is_what_was_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pin,) = (line for line in project["dependencies"] if line.startswith("torch"))
    assert pin == f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
