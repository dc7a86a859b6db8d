"""The survey of published networks: what it keeps, and what its tables say."""

from pathlib import Path

from benchmarks.networks.findings import Finding, read_findings, table, totals, when, write_findings

FOUND = [
    Finding("timm.b", "spatial", "exact", "", 1.5, "2026-11-16", "torch 2.13.0, timm 1.0"),
    Finding("timm.a", "spatial", "refused", "layer `x`: why", 0.1, "2026-11-15", "torch 2.13.0, timm 1.0"),
    Finding("timm.a", "data", "exact", "", 0.1, "2026-11-15", "torch 2.13.0, timm 1.0"),
]
FINDINGS = {(found.network, found.strategy): found for found in FOUND}


def test_findings_come_back_as_they_were_written(tmp_path: Path) -> None:
    write_findings(FINDINGS, tmp_path / "results.jsonl")
    assert read_findings(tmp_path / "results.jsonl") == FINDINGS
    assert read_findings(tmp_path / "none.jsonl") == {}


def test_the_table_has_a_row_a_network_with_the_reason() -> None:
    assert table(FINDINGS)[2:] == ["| timm.a | exact | refused | layer `x`: why |", "| timm.b |  | exact |  |"]
    assert totals(FINDINGS) == ["- `data`: 1 exact", "- `spatial`: 1 exact, 1 refused"]
    assert when(FINDINGS.values()) == "2026-11-15 to 2026-11-16; timm 1.0, torch 2.13.0"


def test_every_kept_finding_keeps_the_promise() -> None:
    """Exact, or refused with a reason: never wrong, never a crash."""
    broken = [found for found in read_findings().values() if found.is_failure]
    silent = [found for found in read_findings().values() if found.result == "refused" and not found.told]
    assert not broken
    assert not silent
