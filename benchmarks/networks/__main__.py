"""`python -m benchmarks.networks PATTERN...`: the networks whose names match, one after another, and a table."""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.networks.published import Published, published
from benchmarks.networks.surveying import MESHES, Finding, survey
from benchmarks.timing import machine

Key = tuple[str, str]


def main() -> None:
    arguments = _arguments()
    known = published()
    findings = _read(arguments.results)
    for name in (n for n in known if any(fnmatch.fnmatchcase(n, pattern) for pattern in arguments.networks)):
        wanted = [s for s in arguments.strategy if arguments.again or (name, s) not in findings]
        for found in _apart(known[name], wanted, arguments) if wanted else ():
            findings[name, found.strategy] = found
            print(f"{name:40} {found.strategy:8} {found.result:8} {found.seconds:6.1f} s  {found.told}", flush=True)
        _write(arguments.results, findings)
    if arguments.page:
        arguments.page.write_text(page(findings))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.networks", description=__doc__)
    parser.add_argument("networks", nargs="*", default=["*"], help="names or patterns, such as 'timm.*'")
    parser.add_argument("--strategy", nargs="+", default=["spatial", "filter", "data"], choices=[*MESHES])
    parser.add_argument("--seconds", type=float, default=300.0, help="the most that one network may take")
    parser.add_argument("--results", type=Path, default=Path("networks.jsonl"), help="kept from run to run")
    parser.add_argument("--dry", action="store_true", help="plan only, which finds what is refused")
    parser.add_argument("--again", action="store_true", help="also run what has a result")
    parser.add_argument("--page", type=Path, help="write the table of all results here")
    return parser.parse_args()


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


def _read(path: Path) -> dict[Key, Finding]:
    lines = path.read_text().splitlines() if path.exists() else []
    found = [Finding(**json.loads(line)) for line in lines]
    return {(f.network, f.strategy): f for f in found}


def _write(path: Path, findings: dict[Key, Finding]) -> None:
    path.write_text("".join(f"{json.dumps(asdict(found))}\n" for found in findings.values()))


def page(findings: dict[Key, Finding]) -> str:
    """The results as Markdown: totals, and a row a network, each from its last run."""
    strategies = [s for s in MESHES if any(strategy == s for _, strategy in findings)]
    rows = ["| network | " + " | ".join(strategies) + " | why not |", "| --- |" + " --- |" * (len(strategies) + 1)]
    for name in sorted({network for network, _ in findings}):
        each = [findings.get((name, strategy)) for strategy in strategies]
        why = "; ".join(dict.fromkeys(found.told for found in each if found and found.told))
        rows.append(f"| {name} | " + " | ".join(found.result if found else "" for found in each) + f" | {why} |")
    counts = {s: Counter(f.result for (_, strategy), f in findings.items() if strategy == s) for s in strategies}
    totals = [f"- `{s}`: " + ", ".join(f"{n} {result}" for result, n in counts[s].most_common()) for s in strategies]
    return "\n".join([HEAD.format(date=date.today(), machine=machine(), versions=_versions()), *totals, "", *rows, ""])


HEAD = """# Published networks

Networks of other packages, unmodified: one step of training in float64 on two ranks, against the model itself on one
process. Exact: outputs and all gradients agree to 1e-7 of each tensor's largest value. Nothing is dropped at random.

{date}, {machine}, {versions}; `python -m benchmarks.networks`
"""


def _versions() -> str:
    packages = ("torchvision", "timm", "segmentation_models_pytorch", "monai", "dynamic_network_architectures")
    return ", ".join(f"{name} {version(name)}" for name in packages)


if __name__ == "__main__":
    main()
