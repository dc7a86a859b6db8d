"""What `convmesh doctor` says of this machine, and of machines that lack something."""

from __future__ import annotations

import importlib.util
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from convmesh.cli import main
from convmesh.cli.exits import Exit
from convmesh.doctor import examine
from convmesh.doctor.host_findings import LEAST_FILES


def findings() -> dict[str, dict[str, str]]:
    return {finding.topic: finding.to_plain() for finding in examine(with_trial=False)}


def test_this_machine_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == Exit.DONE
    shown = capsys.readouterr().out
    assert "✓ two ranks       train as one process does" in shown
    assert shown.endswith("ConvMesh can train here.\n")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--json"]) == Exit.DONE
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert {"torch", "processor", "GPUs", "h5py"} <= {finding["topic"] for finding in told["findings"]}


def test_a_missing_library_comes_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "h5py" else real(name, *rest))
    assert findings()["h5py"] == {
        "topic": "h5py", "state": "missing", "text": "HDF5", "advice": "pip install 'convmesh[data]'",
    }  # fmt: skip


@pytest.fixture
def few_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_FILES // 2, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_files")
def test_a_low_limit_is_named_with_its_remedy() -> None:
    assert findings()["open files"]["state"] == "missing"
    assert f"ulimit -n {LEAST_FILES}" in findings()["open files"]["advice"]


def test_a_machine_without_a_compiler_trains_without_fusing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert findings()["compiler"]["state"] == "missing"


def test_ranks_that_cannot_meet_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("convmesh.doctor.trial.verify", refuse)
    assert main(["doctor"]) == Exit.BAD_INPUT
    assert capsys.readouterr().out.endswith("ConvMesh cannot train here: two ranks.\n")


def refuse(*args: object, **options: object) -> None:
    raise OSError("no sockets here")


ODD = """
import torch
from torch import nn


class Branch(nn.Module):
    def forward(self, x):
        return x if x.mean() > 0 else -x


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.branch, self.last = nn.Conv2d(3, 4, 3, padding=1), Branch(), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        y = self.branch(self.first(x))
        y = torch.linalg.svdvals(y)[..., None] + y
        return self.last(torch.cdist(y, y))


class Closed(Odd):
    def forward(self, x):
        return self.last(self.branch(self.first(x)))
"""


@pytest.fixture
def odd_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_models.py").write_text(ODD, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("odd_models")
def test_a_model_is_told_all_that_has_no_split_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "odd_models:Odd", "--input", "3x8x8", "--json"]) == Exit.BAD_INPUT
    told = json.loads(capsys.readouterr().out)
    assert [(finding["layer"], finding["fate"], finding["line"]) for finding in told["findings"]] == [
        ("branch", "closed", "odd_models.py:17"),
        ("linalg_svdvals", "refused", "odd_models.py:18"),
        ("cdist", "refused", "odd_models.py:19"),
    ]
    assert told["works_under"] == []


@pytest.mark.usefixtures("odd_models")
def test_a_model_with_a_closed_layer_can_be_split(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "odd_models:Closed", "--input", "3x8x8"]) == Exit.DONE
    shown = capsys.readouterr().out
    assert "- branch (Branch) at odd_models.py:24: closed under spatial, filter, channel" in shown
    assert "can be split: by data, spatial, filter, channel; 0 calls refused elsewhere, 1 layers closed." in shown


def test_a_sample_without_a_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--input", "3x8x8"]) == Exit.BAD_INPUT
    assert "name the `--model`" in capsys.readouterr().err
