"""The survey as a run: which cases it takes in which order, and that no case can end it."""

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.networks import running_cases
from benchmarks.networks.cases import Case, cases
from benchmarks.networks.factories import Published
from benchmarks.networks.findings import Finding, append_finding, read_findings
from benchmarks.networks.running_cases import Limits, run_cases
from torch import nn

LATER, EARLIER = "2026-11-18", "2026-11-16"


def finding(network: str, strategy: str, seconds: float, date: str = LATER, result: str = "exact") -> Finding:
    return Finding(network, strategy, result, "", seconds, date)


FOUND = [
    finding("timm.resnet18", "spatial", 3.0),
    finding("timm.darknet53", "spatial", 50.0, EARLIER),
    finding("smp.Unet", "data", 0.0, result="unfinished"),
]
FINDINGS = {(found.network, found.strategy): found for found in FOUND}


def asked(**given: Any) -> list[tuple[str, tuple[str, ...]]]:
    networks = ["timm.resnet18", "timm.darknet53", "smp.Unet", "monai.UNet"]
    options = {
        "strategy": ["spatial", "data"],
        "third": False,
        "seed": 1,
        "again": False,
        "dry": False,
        "since": "",
        "part": (1, 1),
    }
    arguments = argparse.Namespace(**{"networks": networks, "workers": 4} | options | given)
    return [(case.network.name, case.strategies) for case in cases(arguments, FINDINGS)]


def test_what_has_no_result_comes_first_and_of_that_the_longest() -> None:
    assert {*asked()[:2]} == {("monai.UNet", ("spatial", "data")), ("smp.Unet", ("spatial", "data"))}
    assert asked()[2:] == [("timm.darknet53", ("data",)), ("timm.resnet18", ("data",))]


def test_old_results_are_made_again_when_asked() -> None:
    assert ("timm.darknet53", ("spatial", "data")) in asked(since=LATER)
    assert ("timm.resnet18", ("data",)) in asked(since=LATER)


def test_parts_share_the_work() -> None:
    parts = [asked(part=(i, 3)) for i in (1, 2, 3)]
    assert sorted(case for part in parts for case in part) == sorted(asked())
    assert all(len(part) in (1, 2) for part in parts)


def case(name: str, *strategies: str, seconds: float = 0.0) -> Case:
    return Case(Published(name, nn.Identity, (1,)), strategies, seconds)


def surveyed(network: Published, strategies: list[str]) -> Any:
    """Stands for networks that do what their names say."""
    for strategy in strategies:
        yield Finding(network.name, strategy, "exact")
        if network.name == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if network.name == "raises":
            raise ValueError("no such layer")
        if network.name == "hangs":
            time.sleep(60)


def results(todo: list[Case], limits: Limits) -> dict[tuple[str, str], tuple[str, str]]:
    return {(f.network, f.strategy): (f.result, f.told) for _, f in run_cases(todo, limits, is_dry=False)}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_cases, "survey", surveyed)


@pytest.mark.usefixtures("stand_ins")
def test_a_case_that_dies_raises_or_hangs_ends_alone() -> None:
    todo = [case(name, "data", "spatial") for name in ("dies", "raises", "hangs", "runs")]
    found = results(todo, Limits(workers=3, seconds_strategy=1.0, gib=1.0))
    assert {found[name, "data"] for name in ("dies", "raises", "hangs", "runs")} == {("exact", "")}
    assert found["runs", "spatial"] == ("exact", "")
    assert found["dies", "spatial"] == ("crash", "the process died")
    assert found["hangs", "spatial"] == ("unfinished", "takes longer than 1 s here")
    assert found["raises", "spatial"][0] == "crash"
    assert "no such layer" in found["raises", "spatial"][1]


@pytest.mark.usefixtures("stand_ins")
def test_nothing_runs_after_the_budget_and_what_does_not_fit_is_not_begun() -> None:
    begun = time.monotonic()
    todo = [case("hangs", "data", "spatial"), case("runs", "data", seconds=100.0)]
    found = results(todo, Limits(workers=2, seconds_budget=1.0, gib=1.0))
    assert found == {("hangs", "data"): ("exact", "")}
    assert time.monotonic() - begun < 30


def test_appended_findings_are_read_back(tmp_path: Path) -> None:
    for found in FOUND:
        append_finding(found, tmp_path / "lines.jsonl")
    assert read_findings(tmp_path / "lines.jsonl") == FINDINGS
