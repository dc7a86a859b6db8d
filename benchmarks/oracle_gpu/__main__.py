"""Whole training steps of several networks on one GPU, eager and compiled, beside the oracle's predictions.

python -m benchmarks.oracle_gpu [--out FOLDER] [CASE ...]            measures on this machine; results go to the folder
python -m benchmarks.oracle_gpu [CASE ...] --steps [CASE ...]        of these the compiled steps, without operators
python -m benchmarks.oracle_gpu --device cpu --small [CASE ...]      tries that out without a GPU, on small networks
python -m benchmarks.oracle_gpu --evaluate FOLDER                    the page from a folder of results; needs no GPU
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.remote_worker import RemoteWorker

COMMANDS = {
    "measure": ("case", "steps", "graphs", "host", "fused"),
    "profile": ("case", "steps"),
    "operators": ("case",),
}
"""What is asked of all workers before the next is, and of which kinds of workers."""
SECONDS_LAST = 15.0
"""Kept for the measurement of what was late to be ready."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="networks, by the beginning of their names")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="the registry's small networks")
    parser.add_argument("--seconds", type=float, default=150, help="limit of everything")
    parser.add_argument("--prepare-seconds", type=float, default=80, help="limit of what is compiled at the same time")
    parser.add_argument("--steps", nargs="*", default=[], help="networks whose compiled steps alone are measured")
    parser.add_argument("--without-samples", action="store_true", help="no fused kernels, no nodes of the host")
    parser.add_argument("--wait-for", type=Path, help="begin to measure, and to count seconds, when this file is there")
    parser.add_argument("--evaluate", type=Path, help="folder of results")
    parser.add_argument("--table", type=Path, help="where to write the shipped table with their timings")
    options = parser.parse_args()
    if options.evaluate is not None:
        from benchmarks.oracle_gpu.evaluation import evaluate

        print(evaluate(options.evaluate, options.table))
        return
    os.environ["ORACLE_GPU_DEVICE"] = options.device
    os.environ.update({"ORACLE_GPU_SMALL": "1"} if options.small else {})
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    options.out.mkdir(parents=True, exist_ok=True)
    _measure(options)


def _measure(options: argparse.Namespace) -> None:
    from benchmarks.oracle_gpu.cases import CASES

    chosen = [name for name in CASES if not options.cases or name.startswith(tuple(options.cases))]
    steps = [name for name in CASES if name.startswith(tuple(options.steps)) and name not in chosen]
    samples = [] if options.without_samples else [["host"], *(["fused", f"{n}/4"] for n in range(4))]
    words = [["graphs"], *samples, *(["case", name] for name in chosen), *(["steps", name] for name in steps)]
    logs = options.out / "logs"
    logs.mkdir(exist_ok=True)
    workers = {
        " ".join(w): RemoteWorker("benchmarks.oracle_gpu.worker", w, logs / f"{'-'.join(w).replace('/', 'of')}.txt")
        for w in words
    }
    for worker in workers.values():
        worker.send("prepare")
    while options.wait_for is not None and not options.wait_for.exists():
        time.sleep(0.1)
    begin = time.monotonic()
    end = begin + options.seconds
    run = _Run(options.out, workers, begin)
    run.measure_prepared(min(begin + options.prepare_seconds, end), end)
    run.measure_prepared(end - SECONDS_LAST, end)
    for worker in run.waiting.values():
        worker.end()


class _Run:
    """Workers that prepare at the same time, and are measured one by one while the others are stopped."""

    def __init__(self, out: Path, workers: dict[str, RemoteWorker], begin: float) -> None:
        self._out, self._workers, self._begin = out, workers, begin
        self.waiting = dict(workers)
        """Those that still prepare."""

    def measure_prepared(self, until: float, end: float) -> None:
        """Wait for workers, at most until a time, and measure those that are ready."""
        for worker in self.waiting.values():
            worker.has_replied(until - time.monotonic())
        ready = [name for name, worker in self.waiting.items() if worker.has_replied(0)]
        for name in ready:
            print(name, self.waiting.pop(name).receive("prepare", 1), flush=True)
        for worker in self.waiting.values():
            worker.pause()
        for command, kinds in COMMANDS.items():
            for name in ready:
                if name.split()[0] in kinds:
                    self._ask(name, command, end)
        for name in ready:
            self._workers[name].end()
        for worker in self.waiting.values():
            worker.go_on()

    def _ask(self, name: str, command: str, end: float) -> None:
        reply = self._workers[name].ask(command, end - time.monotonic())
        print(f"{time.monotonic() - self._begin:.0f} s", name, command, str(reply)[:160], flush=True)
        _keep(self._out / "measured.json", {n: w.found for n, w in self._workers.items()})


def _keep(file: Path, found: dict[str, Any]) -> None:
    """Write what there is, so that a run that is cut short leaves it behind."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    about = {
        "date": str(datetime.date.today()),
        "device": gpu,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "command": shlex.join(["python", "-m", "benchmarks.oracle_gpu", *sys.argv[1:]]),
    }
    file.write_text(json.dumps({"about": about, "found": found}, indent=1))


if __name__ == "__main__":
    main()
