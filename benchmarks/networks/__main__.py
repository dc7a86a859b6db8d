"""`python -m benchmarks.networks PATTERN...`: the networks whose names match, one after another, and a table.

Exit status 1 if any of them came out wrong or crashed: each must be exact, or refused.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from datetime import date
from functools import reduce
from pathlib import Path

from benchmarks.networks.cases import Case, cases
from benchmarks.networks.factories import import_package
from benchmarks.networks.findings import (
    RESULTS,
    Finding,
    Findings,
    add_finding,
    append_finding,
    joined,
    read_findings,
    slowest,
    table,
    totals,
    when,
    write_findings,
)
from benchmarks.networks.left_out import left_out
from benchmarks.networks.running_cases import Limits, run_cases
from benchmarks.networks.surveying import MESHES, ON_TWO
from benchmarks.timing import machine


def main() -> None:
    arguments = _arguments()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks are forked after a backward pass, which GPUs do not survive
    _merge(arguments.merge, arguments.results)
    limits = Limits(arguments.workers, arguments.seconds, arguments.budget, arguments.gib)
    todo = [] if arguments.merge else _importable(cases(arguments, read_findings(arguments.results)))
    failed = 0
    for case, found in run_cases(todo, limits, arguments.dry):
        failed += found.is_failure
        took = f"plan {found.seconds_plan:5.1f} s, run {found.seconds:6.1f} s"
        print(f"{found.network:40} {found.strategy:12} {found.result:10} {took}  {found.told}", flush=True)
        _keep(_signed(found, case), arguments)
    if arguments.page:
        arguments.page.write_text(page(read_findings(arguments.results)), encoding="utf-8")
    sys.exit(1 if failed else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.networks", description=__doc__)
    parser.add_argument("networks", nargs="*", default=["*"], help="names or patterns, such as 'timm.*'")
    parser.add_argument("--strategy", nargs="*", default=[*ON_TWO], choices=[*MESHES])
    parser.add_argument("--third", action="store_true", help="a third of them, drawn anew, also on 4 ranks")
    parser.add_argument("--seed", type=int, help="draw the same third again")
    parser.add_argument("--workers", type=int, default=1, help="how many networks at a time, each on its ranks")
    parser.add_argument("--seconds", type=float, default=300.0, help="the most that one strategy of a network may take")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which nothing runs any more")
    parser.add_argument(
        "--part", type=_part, default=(1, 1), help="2/3: the second of three surveys that share the work"
    )
    parser.add_argument("--gib", type=float, default=12.0, help="the most memory that a process may take")
    parser.add_argument("--results", type=Path, default=RESULTS, help="kept from run to run")
    parser.add_argument("--append", type=Path, help="write findings here, line by line, and not into the results")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="files of --append, taken into the results")
    parser.add_argument(
        "--dry", action="store_true", help="plan only, in float32: finds what is refused, and keeps the time"
    )
    parser.add_argument("--again", action="store_true", help="also run what has a result")
    parser.add_argument("--since", default="", help="a day: also run what has an older result, as 2026-11-18")
    parser.add_argument("--page", type=Path, help="write the table of all results here")
    return parser.parse_args()


def _part(text: str) -> tuple[int, int]:
    part, _, of = text.partition("/")
    return int(part), int(of)


def _importable(asked: list[Case]) -> list[Case]:
    """The cases whose package is here; it is imported once, and not in each process."""
    here = {package: _imports(package) for package in dict.fromkeys(case.network.package for case in asked)}
    return [case for case in asked if here[case.network.package]]


def _imports(package: str) -> bool:
    try:
        import_package(package)
    except Exception as error:  # a package may break on import in any way; the others' networks run
        print(f"{package}: {type(error).__name__}: {error}; its networks are not run", flush=True)
        return False
    return True


def _signed(found: Finding, case: Case) -> Finding:
    """With what the result holds for."""
    here = machine().partition(", torch")[0]  # its version is among the others
    return replace(found, date=str(date.today()), versions=case.network.versions(), machine=here)


def _keep(found: Finding, arguments: argparse.Namespace) -> None:
    if arguments.append:
        append_finding(found, arguments.append)
    else:
        add_finding(found, arguments.results)


def _merge(files: list[Path], results: Path) -> None:
    """Later files stand before earlier ones."""
    if files:
        write_findings(reduce(joined, map(read_findings, files), read_findings(results)), results)


def page(findings: Findings) -> str:
    """The results as Markdown: totals, and a row a network, each from its last run."""
    machines = " and ".join(sorted({found.machine for found in findings.values() if found.machine})) or machine()
    head = HEAD.format(machine=machines, when=when(findings.values()))
    tables = [*totals(findings), "", slowest(findings), "", *table(findings)]
    return "\n".join([head, *tables, "", "Left out:", "", *left_out(), ""])


HEAD = """# Published networks

Networks of other packages, unmodified: one step of training in float64 on two ranks (`channel` and what follows it: on
four, for a third of the networks, drawn anew each time), against the model itself on one process. Exact: outputs and
all gradients agree to 1e-7 of each tensor's largest value. Where a network computes in float32 inside, to 1e-5 or to
twice what rounding its input to float32 changes in the model itself; the last column then says how far.
Nothing is dropped at random. Unfinished: this machine had too little time or memory. `plan, s` is the processor time of
capturing and planning in one process, in float32 as users bring a network (`--dry`), for the slowest of the strategies
except `auto`, which searches; empty where it was not measured. Other work on the machine makes it longer.

{machine}; {when}; `python -m benchmarks.networks`
"""


if __name__ == "__main__":
    main()
