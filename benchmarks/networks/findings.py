"""What the survey found, kept from run to run in a file of one line a finding; the pages are made from that file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).with_name("results.jsonl")

STRATEGIES = ("data", "spatial", "filter", "channel", "data+spatial", "data+filter", "auto")

Key = tuple[str, str]


@dataclass(frozen=True)
class Finding:
    """What became of a network: `exact`, `refused`, `wrong` or `crash`, and where and why."""

    network: str
    strategy: str
    result: str
    told: str = ""
    seconds: float = 0.0
    date: str = ""
    versions: str = ""
    """Of torch and of the network's package."""

    @property
    def is_failure(self) -> bool:
        """Whether ConvMesh broke its promise: exact, or refused."""
        return self.result in ("wrong", "crash")


Findings = dict[Key, Finding]


def read_findings(path: Path = RESULTS) -> Findings:
    """By network and strategy; none if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {(found.network, found.strategy): found for found in (Finding(**json.loads(line)) for line in lines)}


def write_findings(findings: Findings, path: Path = RESULTS) -> None:
    """In the order of names, so that two runs can be compared line by line."""
    lines = [f"{json.dumps(asdict(findings[key]), ensure_ascii=False)}\n" for key in sorted(findings)]
    path.write_text("".join(lines), encoding="utf-8")


def totals(findings: Findings) -> list[str]:
    """A line a strategy: how many networks came out how."""
    counts = {s: Counter(f.result for f in findings.values() if f.strategy == s) for s in strategies_of(findings)}
    return [f"- `{s}`: " + ", ".join(f"{n} {result}" for result, n in counts[s].most_common()) for s in counts]


def table(findings: Findings) -> list[str]:
    """A row a network, with the reason where it does not run."""
    columns = strategies_of(findings)
    rows = ["| network | " + " | ".join(columns) + " | why not |", "| --- |" + " --- |" * (len(columns) + 1)]
    for name in sorted({network for network, _ in findings}):
        each = [findings.get((name, strategy)) for strategy in columns]
        why = "; ".join(dict.fromkeys(found.told for found in each if found and found.told))
        rows.append(f"| {name} | " + " | ".join(found.result if found else "" for found in each) + f" | {why} |")
    return rows


def strategies_of(findings: Findings) -> list[str]:
    return [s for s in STRATEGIES if any(strategy == s for _, strategy in findings)]


def when(findings: Iterable[Finding]) -> str:
    """The days of the runs, and the packages' versions."""
    found = list(findings)
    days = sorted({f.date for f in found})
    packages = sorted({package for f in found for package in f.versions.split(", ")})
    return f"{' to '.join(dict.fromkeys((days[0], days[-1])))}; {', '.join(packages)}"
