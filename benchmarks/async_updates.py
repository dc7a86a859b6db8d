"""Asynchronous weight updates against synchronous ones, on digits: what an epoch teaches, and how long it takes.

python -m benchmarks.async_updates [--ranks N] [--epochs N]     prints the tables of benchmarks/async_updates.md
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.slow_down import SlowDown
from benchmarks.timing import machine
from convmesh.testing import run_ranks
from convmesh.train.config_files import config_of, load_config
from convmesh.train.training import train_run

FACTOR = 3.0
"""How much slower the last rank is in the second table."""

EXAMPLE = Path(__file__).parents[1] / "examples" / "digits.toml"
SYNC = {"synchronous": "step", "asynchronous": "async"}


def cross_entropy(output: Any, target: Any) -> Any:
    """The runs' loss; on the last rank it takes as long as `FACTOR` says, if a run asks for it."""
    return _LOSS(output, target)


_LOSS = SlowDown(F.cross_entropy)


def trained(sync: str, epochs: int, folder: str, is_slowed: bool) -> dict[str, Any]:
    """The summary of a run of the example, evaluated after every epoch."""
    tables = load_config(EXAMPLE).model_dump()
    tables |= {"sync": sync, "epochs": epochs, "precision": "fp32", "loss": "benchmarks.async_updates:cross_entropy"}
    tables["plan"] |= {"strategy": "data", "predict": False}
    tables["evaluation"] |= {"every_epochs": 1}
    tables["checkpoint"] |= {"every_epochs": 0}
    loss = importlib.import_module("benchmarks.async_updates")._LOSS  # that of the module that runs look up by name
    loss.factor = FACTOR if is_slowed and dist.get_rank() == dist.get_world_size() - 1 else 1.0
    return train_run(config_of(tables, "digits"), Path(folder))[0]


def runs(ranks: int, epochs: int, is_slowed: bool) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Summaries, and evaluations by epoch."""
    found = {}
    for name, sync in SYNC.items():
        with tempfile.TemporaryDirectory() as folder:
            summary = run_ranks(ranks, trained, sync, epochs, folder, is_slowed, seconds_timeout=3600)[0]
            lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        found[name] = summary, [each["eval"] for each in map(json.loads, lines) if "eval" in each]
    return found


def shown(epochs: int) -> list[int]:
    return sorted({epoch for epoch in (1, 2, 3, 5, 10, 15, 20, 30, 40) if epoch < epochs} | {epochs})


def curves(found: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]], epochs: int) -> str:
    head = ["epoch", *(f"{name}: {what}" for name in found for what in ("test accuracy", "test loss"))]
    rows = [head, ["---"] * len(head)]
    for epoch in shown(epochs):
        judged = [judged[epoch - 1] for _, judged in found.values()]
        rows.append([str(epoch), *(text for e in judged for text in (f"{e['accuracy']:.2%}", f"{e['loss']:.4f}"))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def times(found: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]) -> str:
    told = []
    for name, (summary, judged) in found.items():
        extra = summary.get("asynchronous")
        late = f"; {extra['updates']} updates, {extra['mean_staleness']:.2f} versions late on average" if extra else ""
        told.append(
            f"- {name}: {summary['seconds_total']:.1f} s, {1e3 * summary['measured_seconds_step']:.1f} ms a step, "
            f"test accuracy {judged[-1]['accuracy']:.2%}{late}"
        )
    return "\n".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    given = parser.parse_args()
    command = f"python -m benchmarks.async_updates --ranks {given.ranks} --epochs {given.epochs}"
    print("# Asynchronous weight updates\n")
    print(f"{datetime.date.today()}, {machine()}, {given.ranks} ranks × 1 thread over Gloo; command: `{command}`\n")
    equal = runs(given.ranks, given.epochs, is_slowed=False)
    print(f"### Ranks of equal speed\n\n{curves(equal, given.epochs)}\n\n{times(equal)}\n", flush=True)
    unequal = runs(given.ranks, given.epochs, is_slowed=True)
    print(f"### One rank at a third of its speed\n\n{curves(unequal, given.epochs)}\n\n{times(unequal)}\n")


if __name__ == "__main__":
    main()
