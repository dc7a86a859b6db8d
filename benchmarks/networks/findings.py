"""What the survey found, kept from run to run in a file of one line a finding; the pages are made from that file."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

RESULTS = Path(__file__).with_name("results.jsonl")

STRATEGIES = ("data", "spatial", "filter", "channel", "data+spatial", "data+filter", "auto")

PLANNED = "planned"
"""The result of a survey that plans and runs nothing: it tells the time."""

MOST_SECONDS_PLAN = 5.0
"""What capturing and planning a network may take, of one core."""

Key = tuple[str, str]


@dataclass(frozen=True)
class Finding:
    """What became of a network: `exact`, `refused`, `wrong`, `crash` or `unfinished`, and where and why."""

    network: str
    strategy: str
    result: str
    told: str = ""
    seconds: float = 0.0
    date: str = ""
    versions: str = ""
    """Of torch and of the network's package."""
    seconds_plan: float = 0.0
    """Processor time of capturing and planning in float32, in one process; 0 where it was not measured."""
    machine: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether ConvMesh broke its promise: exact, or refused."""
        return self.result in ("wrong", "crash")

    @property
    def is_unfinished(self) -> bool:
        """Whether it was not run, or the machine had too little time or memory: it tells nothing of ConvMesh."""
        return self.result in ("unfinished", PLANNED)


Findings = dict[Key, Finding]


def read_findings(path: Path = RESULTS) -> Findings:
    """By network and strategy; none if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {(found.network, found.strategy): found for found in (Finding(**json.loads(line)) for line in lines)}


def write_findings(findings: Findings, path: Path = RESULTS) -> None:
    """In the order of names, so that two runs can be compared line by line."""
    lines = [f"{json.dumps(asdict(findings[key]), ensure_ascii=False)}\n" for key in sorted(findings)]
    beside = path.with_suffix(".new")
    beside.write_text("".join(lines), encoding="utf-8")
    beside.replace(path)  # at once: a survey that is stopped loses nothing


def add_finding(found: Finding, path: Path = RESULTS) -> None:
    """Into the file at once: what runs for hours may be stopped at any time."""
    write_findings(joined(read_findings(path), {(found.network, found.strategy): found}), path)


def joined(known: Findings, later: Findings) -> Findings:
    """What is known now: runs tell results, plans tell times, and what a machine had no room for tells nothing new."""
    return known | {key: _latest(known.get(key), found) for key, found in later.items()}


def _latest(known: Finding | None, found: Finding) -> Finding:
    if known is None:
        return found
    if found.result == PLANNED:
        return replace(known, seconds_plan=found.seconds_plan)
    if found.is_unfinished:
        return known
    return replace(found, seconds_plan=found.seconds_plan or known.seconds_plan)


def append_finding(found: Finding, path: Path) -> None:
    """One line, on the disk before this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(asdict(found), ensure_ascii=False)}\n")
        file.flush()
        os.fsync(file.fileno())


def totals(findings: Findings) -> list[str]:
    """A line a strategy: how many networks came out how."""
    counts = {s: Counter(f.result for f in findings.values() if f.strategy == s) for s in strategies_of(findings)}
    return [f"- `{s}`: " + ", ".join(f"{n} {result}" for result, n in counts[s].most_common()) for s in counts]


def table(findings: Findings) -> list[str]:
    """A row a network, with the reason where it does not run."""
    columns = strategies_of(findings)
    rows = [
        "| network | " + " | ".join(columns) + " | plan, s | why not |",
        "| --- |" + " --- |" * len(columns) + " --: | --- |",
    ]
    for name in sorted({network for network, _ in findings}):
        each = [findings.get((name, strategy)) for strategy in columns]
        why = "; ".join(dict.fromkeys(found.told for found in each if found and found.told))
        results = " | ".join(found.result if found else "" for found in each)
        rows.append(f"| {name} | {results} | {_seconds(seconds_plan(found for found in each if found))} | {why} |")
    return rows


def seconds_plan(each: Iterable[Finding]) -> float:
    """The slowest to plan of a network's strategies, without the search; 0 if none was measured."""
    return max((found.seconds_plan for found in each if found.strategy != "auto"), default=0.0)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds else ""


def slowest(findings: Findings) -> str:
    """The networks that take longest to capture and plan, in a line."""
    by_network = {name: seconds_plan(f for f in findings.values() if f.network == name) for name, _ in findings}
    worst = sorted(by_network.items(), key=lambda item: -item[1])
    measured = [seconds for _, seconds in worst if seconds]
    if not measured:
        return ""
    within = sum(seconds <= MOST_SECONDS_PLAN for seconds in measured)
    names = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in worst[:5] if seconds)
    held = f"{within} of {len(measured)} networks are captured and planned within {MOST_SECONDS_PLAN:.0f} s"
    return f"{held} of processor time; slowest: {names}."


def strategies_of(findings: Findings) -> list[str]:
    return [s for s in STRATEGIES if any(strategy == s for _, strategy in findings)]


def when(findings: Iterable[Finding]) -> str:
    """The days of the runs, and the packages' versions."""
    found = list(findings)
    days = sorted({f.date for f in found})
    packages = sorted({package for f in found for package in f.versions.split(", ")})
    return f"{' to '.join(dict.fromkeys((days[0], days[-1])))}; {', '.join(packages)}"
