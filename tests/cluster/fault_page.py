"""What came of faults, as a table and as docs/reliability.md."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Tried:
    """A fault and what came of it."""

    name: str
    problem: str
    """Why the run did not survive, or nothing."""
    steps_lost: int
    seconds_to_recover: float | None
    """Until ranks trained again; None if they never ceased to."""
    told: str
    """What supervisors said, if there is a problem."""
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))

    def line(self) -> str:
        return f"{self.name}: {self.problem or 'survived'}\n{self.told}"


def keep_result(file: Path, result: Tried) -> None:
    """Add a line to a file."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(result)) + "\n")


def read_results(file: Path) -> list[Tried]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Tried(**json.loads(line)) for line in lines]


def in_order(results: Sequence[Tried], names: Sequence[str]) -> list[Tried]:
    """As the matrix lists them."""
    return sorted(results, key=lambda each: names.index(each.name))


def table(results: Sequence[Tried]) -> str:
    """A row for each fault."""
    rows = [
        "| fault | times | survived | steps lost, at most | seconds to recover, median |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(each.name for each in results):
        same = [each for each in results if each.name == name]
        well = sum(not each.problem for each in same)
        seconds = sorted(each.seconds_to_recover for each in same if each.seconds_to_recover is not None)
        median = f"{seconds[len(seconds) // 2]:.0f}" if seconds else "did not stop"
        rows.append(f"| {name} | {len(same)} | {well} | {max(each.steps_lost for each in same)} | {median} |")
    return "\n".join(rows) + "\n"


def rewritten(before: str, results: Sequence[Tried]) -> str:
    """The page with other results; what people wrote below them stays."""
    return page(results) + END + before.partition(END)[2]


def page(results: Sequence[Tried]) -> str:
    dates = sorted({each.date for each in results})
    return HEAD.format(
        dates=" to ".join(dict.fromkeys((dates[0], dates[-1]))),
        cores=len(os.sched_getaffinity(0)),
        kernel=platform.release().partition("-")[0],
        kept=KEPT,
        table=table(results),
    )


KEPT, END = "benchmarks/faults.jsonl", "<!-- end of the table of faults -->\n"
HEAD = """# Reliability

Measured {dates} on a machine with {cores} cores that other work kept busy (Linux {kernel}), several tries at a time, by
`python -m tests.cluster.matrix --times N --results {kept} --page docs/reliability.md`; that file has every
try. `make test-faults` tries each fault once, `TIMES=20` 20 times.

Two hosts are two network namespaces joined by a switch, each with a supervisor, one rank and an address of its own.
A run of 40 steps (LeNet-5 in float64, a checkpoint every 4 steps, `--timeout-seconds 20`) is struck at a random
moment. It survived if supervisors ended with status 0 and said what was lost, and all 40 losses and the final
weights are those of a run that nobody disturbed: to the bit on the same ranks, to 1e-9 where it went on with fewer.
Seconds are those until ranks trained again, most of them for starting Python and torch; a host that is silent is
given 20 s first.

{table}"""
