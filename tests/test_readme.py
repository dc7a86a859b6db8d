"""What the README shows is true."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from convmesh.cli.main import VERBS
from tests.matrix import README, in_readme

ROOT = README.parent


def test_support_matrix_is_that_of_the_tests() -> None:
    command = [sys.executable, "-m", "pytest", "tests/ops", "--collect-only", "-q", "--show-matrix"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(rows) > 20
    assert "\n".join(rows) == in_readme(), "run `make matrix`"


def test_first_example_runs_as_printed(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    script = tmp_path / "first.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", str(script)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 3
    assert losses[2] < losses[0]


def test_channel_example_runs_as_printed() -> None:
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert [line.split()[:2] for line in printed.splitlines()] == [["0", "y"], ["2", "y"], ["4", "x"]]


def test_verbs_are_typed_as_printed() -> None:
    """Their own tests run them; here it is what the README tells people to type."""
    printed = re.findall(r"^    convmesh (\w+)(.*)$", README.read_text(), re.MULTILINE)
    assert {"plan", "scale", "calibrate", "validate", "explain"} <= {verb for verb, _ in printed}
    for verb, rest in printed:
        module = importlib.import_module(VERBS[verb].module)
        options = getattr(module, f"{verb.capitalize()}Options")
        tyro.cli(options, args=shlex.split(rest, comments=True), config=(tyro.conf.FlagCreatePairsOff,))


def test_the_oracles_page_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/oracle.md").read_text(), re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.splitlines()[-1].startswith("True ")


def test_demo_runs() -> None:
    printed = subprocess.run(
        [sys.executable, "examples/demo.py"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert "Largest relative difference" in printed


def test_links_lead_somewhere() -> None:
    for page in [README, ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_testing_page_runs_as_printed(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/testing.md").read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code)
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=120).stdout
    assert printed == "equal to a single device\n"
