"""`python -m benchmarks.networks PATTERN...`: the networks whose names match, one after another, and a table.

Exit status 1 if any of them came out wrong or crashed: each must be exact, or refused.
"""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import random
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.networks.factories import Published
from benchmarks.networks.findings import RESULTS, Finding, Findings, read_findings, table, totals, when, write_findings
from benchmarks.networks.published import published
from benchmarks.networks.surveying import MESHES, ON_FOUR, ON_TWO, survey
from benchmarks.timing import machine

Work = list[tuple[Published, list[str]]]


def main() -> None:
    arguments = _arguments()
    findings = read_findings(arguments.results)
    failed = 0
    for network, strategies in _work(arguments, findings):
        for found in _apart(network, strategies, arguments):
            dated = replace(found, date=str(date.today()), versions=network.versions())
            findings[network.name, found.strategy] = dated
            failed += found.is_failure
            took = f"{found.seconds:6.1f} s"
            print(f"{network.name:40} {found.strategy:12} {found.result:8} {took}  {found.told}", flush=True)
        if not arguments.dry:
            write_findings(findings, arguments.results)
    if arguments.page:
        arguments.page.write_text(page(findings), encoding="utf-8")
    sys.exit(1 if failed else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.networks", description=__doc__)
    parser.add_argument("networks", nargs="*", default=["*"], help="names or patterns, such as 'timm.*'")
    parser.add_argument("--strategy", nargs="+", default=[*ON_TWO], choices=[*MESHES])
    parser.add_argument("--third", action="store_true", help="a third of them, drawn anew, also on 4 ranks")
    parser.add_argument("--seed", type=int, help="draw the same third again")
    parser.add_argument("--seconds", type=float, default=300.0, help="the most that one network may take")
    parser.add_argument("--results", type=Path, default=RESULTS, help="kept from run to run")
    parser.add_argument("--dry", action="store_true", help="plan only, which finds what is refused, and keep nothing")
    parser.add_argument("--again", action="store_true", help="also run what has a result")
    parser.add_argument("--page", type=Path, help="write the table of all results here")
    return parser.parse_args()


def _work(arguments: argparse.Namespace, findings: Findings) -> Work:
    """The networks, each with the strategies that it is tried under."""
    asked = [n for n in published().values() if any(fnmatch.fnmatchcase(n.name, p) for p in arguments.networks)]
    drawn = _third(asked, arguments.seed) if arguments.third else set()
    work = [(n, [*arguments.strategy, *(ON_FOUR if n.name in drawn else ())]) for n in asked]
    if not arguments.again:
        work = [(n, [s for s in strategies if (n.name, s) not in findings]) for n, strategies in work]
    return [(n, strategies) for n, strategies in work if strategies]


def _third(networks: list[Published], seed: int | None) -> set[str]:
    seed = random.SystemRandom().randrange(10_000) if seed is None else seed
    print(f"a third of the networks also on 4 ranks: --seed {seed} draws the same", flush=True)
    return set(random.Random(seed).sample([n.name for n in networks], len(networks) // 3))


def _apart(network: Published, strategies: list[str], arguments: argparse.Namespace) -> Iterator[Finding]:
    """In a process of its own: what a network keeps in memory, or breaks, ends with it."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_send, args=(theirs, network, strategies, arguments.dry)
    )
    process.start()
    theirs.close()
    left = dict.fromkeys(strategies)
    while left:
        try:
            found: Finding | str = ours.recv() if ours.poll(arguments.seconds) else "takes too long"
        except EOFError:
            found = "the process died"
        if isinstance(found, str):
            yield from (Finding(network.name, strategy, "crash", found) for strategy in left)
            break
        del left[found.strategy]
        yield found
    process.kill()
    process.join()


def _send(pipe: Connection, network: Published, strategies: list[str], is_dry: bool) -> None:
    try:
        for found in survey(network, strategies, is_dry):
            pipe.send(found)
    except BaseException as error:  # whatever it is, it is a finding
        last = traceback.extract_tb(error.__traceback__)[-1]
        pipe.send(f"{type(error).__name__}: {error}"[:300] + f" ({Path(last.filename).name}:{last.lineno})")


def page(findings: Findings) -> str:
    """The results as Markdown: totals, and a row a network, each from its last run."""
    head = HEAD.format(machine=machine(), when=when(findings.values()))
    return "\n".join([head, *totals(findings), "", *table(findings), ""])


HEAD = """# Published networks

Networks of other packages, unmodified: one step of training in float64 on two ranks (`channel` and what follows it: on
four, for a third of the networks, drawn anew each time), against the model itself on one process. Exact: outputs and
all gradients agree to 1e-7 of each tensor's largest value. Nothing is dropped at random.

{machine}; {when}; `python -m benchmarks.networks`
"""


if __name__ == "__main__":
    main()
