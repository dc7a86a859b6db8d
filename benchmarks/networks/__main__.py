"""`python -m benchmarks.networks PATTERN...`: the networks whose names match, one after another, and a table.

Exit status 1 if any of them came out wrong or crashed: each must be exact, or refused.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import math
import multiprocessing
import os
import random
import resource
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.networks.factories import Published, import_package
from benchmarks.networks.findings import (
    RESULTS,
    Finding,
    Findings,
    add_finding,
    read_findings,
    slowest,
    table,
    totals,
    when,
)
from benchmarks.networks.left_out import left_out
from benchmarks.networks.published import published
from benchmarks.networks.surveying import MESHES, ON_FOUR, ON_TWO, survey
from benchmarks.timing import machine

Work = list[tuple[Published, list[str]]]


def main() -> None:
    arguments = _arguments()
    failed = 0
    for network, strategies in _work(arguments, read_findings(arguments.results)):
        import_package(network.package)  # here, once, and not in each process
        for found in _apart(network, strategies, arguments):
            failed += found.is_failure
            took = f"plan {found.seconds_plan:5.1f} s, run {found.seconds:6.1f} s"
            print(f"{network.name:40} {found.strategy:12} {found.result:8} {took}  {found.told}", flush=True)
            if not arguments.dry:
                add_finding(replace(found, date=str(date.today()), versions=network.versions()), arguments.results)
            elif known := read_findings(arguments.results).get((network.name, found.strategy)):
                add_finding(replace(known, seconds_plan=found.seconds_plan), arguments.results)
    if arguments.page:
        arguments.page.write_text(page(read_findings(arguments.results)), encoding="utf-8")
    sys.exit(1 if failed else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.networks", description=__doc__)
    parser.add_argument("networks", nargs="*", default=["*"], help="names or patterns, such as 'timm.*'")
    parser.add_argument("--strategy", nargs="+", default=[*ON_TWO], choices=[*MESHES])
    parser.add_argument("--third", action="store_true", help="a third of them, drawn anew, also on 4 ranks")
    parser.add_argument("--seed", type=int, help="draw the same third again")
    parser.add_argument("--seconds", type=float, default=300.0, help="the most that one strategy of a network may take")
    parser.add_argument("--gib", type=float, default=12.0, help="the most memory that a process may take")
    parser.add_argument("--results", type=Path, default=RESULTS, help="kept from run to run")
    parser.add_argument("--dry", action="store_true", help="plan only: finds what is refused, and keeps the time")
    parser.add_argument("--again", action="store_true", help="also run what has a result")
    parser.add_argument("--page", type=Path, help="write the table of all results here")
    return parser.parse_args()


def _work(arguments: argparse.Namespace, findings: Findings) -> Work:
    """The networks in the order of the patterns, each with the strategies that it is tried under."""
    asked = _asked(arguments.networks, findings)
    drawn = _third(asked, arguments.seed) if arguments.third else set()
    work = [(n, [*arguments.strategy, *(ON_FOUR if n.name in drawn else ())]) for n in asked]
    if not arguments.again:
        done = {key for key, found in findings.items() if not found.is_unfinished}
        work = [(n, [s for s in strategies if (n.name, s) not in done]) for n, strategies in work]
    return [(n, strategies) for n, strategies in work if strategies]


def _asked(patterns: list[str], findings: Findings) -> list[Published]:
    """Of each pattern those first that were tried least, and small ones."""
    tried = Counter(network for network, _ in findings)
    every = sorted(published().values(), key=lambda n: (tried[n.name], math.prod(n.shape)))
    return [*dict.fromkeys(n for pattern in patterns for n in every if fnmatch.fnmatchcase(n.name, pattern))]


def _third(networks: list[Published], seed: int | None) -> set[str]:
    seed = random.SystemRandom().randrange(10_000) if seed is None else seed
    print(f"a third of the networks also on 4 ranks: --seed {seed} draws the same", flush=True)
    return set(random.Random(seed).sample([n.name for n in networks], len(networks) // 3))


def _apart(network: Published, strategies: list[str], arguments: argparse.Namespace) -> Iterator[Finding]:
    """In a process of its own: what a network keeps in memory, or breaks, ends with it."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_send, args=(theirs, network, strategies, arguments))
    process.start()
    theirs.close()
    left = dict.fromkeys(strategies)
    while left:
        found = _received(ours, arguments.seconds)
        if isinstance(found, Finding):
            del left[found.strategy]
            yield found
            continue
        result, told = found
        yield from (Finding(network.name, strategy, result, told) for strategy in left)
        break
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
    process.join()


def _received(pipe: Connection, seconds: float) -> Finding | tuple[str, str]:
    """The next finding, or what became of all that are left."""
    try:
        return pipe.recv() if pipe.poll(seconds) else ("unfinished", f"takes longer than {seconds:.0f} s here")
    except EOFError:
        return "crash", "the process died"


def _send(pipe: Connection, network: Published, strategies: list[str], arguments: argparse.Namespace) -> None:
    os.setsid()
    most = int(arguments.gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        for found in survey(network, strategies, arguments.dry):
            pipe.send(found)
    except BaseException as error:  # whatever it is, it is a finding
        last = traceback.extract_tb(error.__traceback__)[-1]
        is_full = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        told = f"{type(error).__name__}: {error}"[:300] + f" ({Path(last.filename).name}:{last.lineno})"
        pipe.send(("unfinished", "takes more memory than there is here") if is_full else ("crash", told))


def page(findings: Findings) -> str:
    """The results as Markdown: totals, and a row a network, each from its last run."""
    head = HEAD.format(machine=machine(), when=when(findings.values()))
    tables = [*totals(findings), "", slowest(findings), "", *table(findings)]
    return "\n".join([head, *tables, "", "Left out:", "", *left_out(), ""])


HEAD = """# Published networks

Networks of other packages, unmodified: one step of training in float64 on two ranks (`channel` and what follows it: on
four, for a third of the networks, drawn anew each time), against the model itself on one process. Exact: outputs and
all gradients agree to 1e-7 of each tensor's largest value, to 1e-5 where a network computes in float32 inside.
Nothing is dropped at random. Unfinished: this machine had too little time or memory. `plan, s` is the processor time of
capturing and planning in one process, for the slowest of the strategies except `auto`, which searches; empty where it
was not measured. Other work on the machine makes it longer.

{machine}; {when}; `python -m benchmarks.networks`
"""


if __name__ == "__main__":
    main()
