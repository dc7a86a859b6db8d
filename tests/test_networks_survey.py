"""The survey of published networks: what it keeps, and what its tables say."""

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.networks.findings import (
    PLANNED,
    Finding,
    add_finding,
    joined,
    read_findings,
    slowest,
    table,
    totals,
    when,
    write_findings,
)
from benchmarks.networks.medical import medical
from benchmarks.networks.published import published
from benchmarks.networks.segmentation_decoders import segmentation_models
from benchmarks.networks.surveying import ON_TWO, survey
from benchmarks.networks.timm_families import timm_networks
from benchmarks.networks.torchvision_builders import torchvision_networks

FOUND = [
    Finding("timm.b", "spatial", "exact", "", 1.5, "2026-11-16", "torch 2.13.0, timm 1.0"),
    Finding("timm.a", "spatial", "refused", "layer `x`: why", 0.1, "2026-11-15", "torch 2.13.0, timm 1.0", 6.25),
    Finding("timm.a", "data", "exact", "", 0.1, "2026-11-15", "torch 2.13.0, timm 1.0", 1.0),
]
SAMPLE = (
    "nnunet.PlainConvUNet", "torchvision.squeezenet1_1", "timm.test_vit", "smp.Unet",
    "monai.UNet", "neuralop.FNO",
)  # fmt: skip
"""Small networks of every package; those whose package is not installed are skipped."""
FINDINGS = {(found.network, found.strategy): found for found in FOUND}


def test_findings_come_back_as_they_were_written(tmp_path: Path) -> None:
    write_findings(FINDINGS, tmp_path / "results.jsonl")
    assert read_findings(tmp_path / "results.jsonl") == FINDINGS
    assert read_findings(tmp_path / "none.jsonl") == {}


def test_a_finding_is_added_to_those_of_other_runs(tmp_path: Path) -> None:
    for found in (*FOUND, latest := replace(FOUND[0], result="wrong")):
        add_finding(found, tmp_path / "results.jsonl")
    assert read_findings(tmp_path / "results.jsonl") == FINDINGS | {("timm.b", "spatial"): latest}


def test_a_plan_alone_tells_the_time_and_a_run_the_result() -> None:
    key = ("timm.b", "spatial")
    timed = joined(FINDINGS, {key: Finding(*key, PLANNED, seconds_plan=2.5)})[key]
    assert (timed.result, timed.seconds, timed.seconds_plan) == ("exact", 1.5, 2.5)
    again = joined({key: timed}, {key: Finding(*key, "refused", "why")})[key]
    assert (again.result, again.told, again.seconds_plan) == ("refused", "why", 2.5)
    assert joined({key: again}, {key: Finding(*key, "unfinished", "no room")}) == {key: again}


def test_a_network_that_a_machine_has_no_room_for_is_tried_again() -> None:
    cut_short = Finding("timm.a", "data", "unfinished", "takes longer than 300 s here")
    assert cut_short.is_unfinished
    assert not cut_short.is_failure


def test_names_of_networks_are_those_of_packages_and_no_network_is_listed_twice() -> None:
    names = [n.name for n in (*torchvision_networks(), *timm_networks(), *segmentation_models(), *medical())]
    assert len(names) == len({*names})
    assert {n.package for n in published().values()} == {"torchvision", "timm", "smp", "monai", "nnunet", "neuralop"}


def test_the_table_has_a_row_a_network_with_the_reason() -> None:
    assert table(FINDINGS)[2:] == [
        "| timm.a | exact | refused | 6.2 | layer `x`: why |",
        "| timm.b |  | exact |  |  |",
    ]
    assert totals(FINDINGS) == ["- `data`: 1 exact", "- `spatial`: 1 exact, 1 refused"]
    assert when(FINDINGS.values()) == "2026-11-15 to 2026-11-16; timm 1.0, torch 2.13.0"

    assert slowest(FINDINGS).startswith("0 of 1 networks are captured and planned within 5 s")


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_published_networks_is_exact(name: str) -> None:
    try:
        found = list(survey(published()[name], [*ON_TWO]))
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
    assert [(f.strategy, f.result, f.told) for f in found] == [(strategy, "exact", "") for strategy in ON_TWO]


def test_every_kept_finding_keeps_the_promise() -> None:
    """Exact, or refused with a reason: never wrong, never a crash."""
    broken = [found for found in read_findings().values() if found.is_failure]
    silent = [found for found in read_findings().values() if found.result == "refused" and not found.told]
    assert not broken
    assert not silent
