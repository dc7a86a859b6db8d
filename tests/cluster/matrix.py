"""Tries every fault on a run across two hosts and prints a table: `make test-faults`, or

python -m tests.cluster.matrix [--times 20] [--only TEXT] [--results FILE] [--page docs/reliability.md]
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from convmesh.checkpoint.weights_export import export_weights
from tests.cluster.cluster import Cluster, why_not
from tests.cluster.fault_page import Tried, in_order, keep_result, read_results, rewritten, table
from tests.cluster.faults import FAULTS, SECONDS_TIMEOUT, Fault
from tests.cluster.training import ROOT, Training

STEPS, SAVE_EVERY = 40, 4
OPTIONS = (
    "--steps", str(STEPS), "--checkpoint.every-steps", str(SAVE_EVERY), "--plan.strategy", "data",
    "--timeout-seconds", str(SECONDS_TIMEOUT),
)  # fmt: skip
SKEWED = str(Path(__file__).parent / "skewed")


@dataclass(frozen=True)
class Result:
    """What a run ends with."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


def result_of(run: Training) -> Result:
    exported = export_weights(run.folder, run.folder.parent / "weights.safetensors")
    return Result(run.losses(), load_file(exported.path))


def problem_of(found: Result, expected: Result, is_exact: bool) -> str:
    """In what a run differs from the undisturbed one, or nothing; on other ranks sums are rounded otherwise."""
    tolerance = 0.0 if is_exact else 1e-9
    if found.losses != pytest.approx(expected.losses, rel=tolerance, abs=tolerance):
        return "other losses"
    same = all(
        torch.allclose(found.weights[name], value, tolerance, tolerance) for name, value in expected.weights.items()
    )
    return "" if same and found.weights.keys() == expected.weights.keys() else "other weights"


@contextlib.contextmanager
def place(fault: Fault) -> Iterator[Training]:
    """Two hosts and a new folder."""
    options = [*OPTIONS, "--min-ranks", "2" if fault.keeps_world else "1"]
    with tempfile.TemporaryDirectory() as folder, Cluster(2, wired=fault.is_wired) as cluster:
        run = Training(cluster, Path(folder), options, pace=fault.seconds_pace)
        if not fault.is_small_disk:
            yield run
            return
        run.folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(run.folder)], check=True)
        try:
            yield run
        finally:
            subprocess.run(["umount", "--lazy", str(run.folder)], check=True)


def undisturbed() -> Result:
    with place(Fault("nothing", lambda _: None, seconds_pace=0.0)) as run:
        run.start_all()
        if run.ends() != [0, 0]:
            raise RuntimeError(run.told())
        return result_of(run)


def tried(fault: Fault, expected: Result) -> Tried:
    """One run, struck at a random moment."""
    with place(fault) as run:
        run.start(0)
        run.start(1, environment={"PYTHONPATH": SKEWED} if fault.is_skewed else None)
        try:
            run.await_step(random.randint(SAVE_EVERY + 2, STEPS // 2))
            began = time.time()
            fault.strike(run)
            statuses = run.ends(*fault.ends)
            problem = _problem(fault, run, statuses) or problem_of(result_of(run), expected, fault.keeps_world)
        except Exception as error:  # the table tells of it, and other faults are tried
            problem, began = f"{type(error).__name__}: {error}", 0.0
        told = run.told()
        return Tried(fault.name, problem, *_cost(run, began), told if problem else "")


def _problem(fault: Fault, run: Training, statuses: Sequence[int]) -> str:
    if any(statuses):
        return f"ended with {statuses}"
    return "" if re.search(fault.tells, run.told(), re.DOTALL) else f"nobody said {fault.tells!r}"


def _cost(run: Training, began: float) -> tuple[int, float | None]:
    """Steps that were done twice, and the seconds from the fault until ranks trained again, if they ever stopped."""
    events = run.events()
    lost = [each["step"] for each in events if each["kind"] in ("lost", "failed")]
    back = [each for each in events if each["kind"] == "resumed"]
    if not back or not began:
        return 0, None
    return max(0, max(lost, default=0) - back[0]["step"]), back[0]["time"] - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=1, help="how often each fault is tried")
    parser.add_argument("--only", default="", help="faults whose names have this text")
    parser.add_argument(
        "--results", type=Path, help="a file that keeps results; the table shows those of earlier runs too"
    )
    parser.add_argument("--page", type=Path, help="where to write the page")
    options = parser.parse_args()
    if why_not():
        sys.stdout.write(f"no faults were tried: {why_not()}\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        kept = options.results or Path(folder) / "results.jsonl"
        chosen = [each for _ in range(options.times) for each in FAULTS if options.only in each.name]
        if chosen:
            _try_all(chosen, kept)
        results = in_order(read_results(kept), [each.name for each in FAULTS])
    sys.stdout.write(table(results))
    if options.page:
        file = ROOT / options.page
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        file.write_text(rewritten(before, results), encoding="utf-8")
    return int(any(each.problem for each in results))


def _try_all(faults: Sequence[Fault], kept: Path) -> None:
    expected = undisturbed()
    for fault in faults:
        result = tried(fault, expected)
        keep_result(kept, result)
        sys.stdout.write(result.line())
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
