"""Changes files of every kind at random for a while: python -m tests.fuzz [--seconds 3600] [--seed 0] [--only TEXT]

Every file must be read, or refused by one of our errors. Exit status 1 if one was not; --show prints a seed's file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.targets import Target, targets
from tests.fuzz.trials import changed, tried

SEEDS_A_PROCESS = 200


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0, help="where to begin")
    parser.add_argument("--only", default="", help="kinds of files whose names have this in them")
    parser.add_argument("--show", type=int, help="write the file of this seed to the terminal, and read it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        chosen = [target for target in targets(Path(folder)) if arguments.only in target.name]
        if arguments.show is not None:
            _show(chosen[0], arguments.show)
        sys.exit(_fuzz(chosen, arguments.seed, arguments.seconds))


def _fuzz(chosen: list[Target], seed: int, seconds: float) -> int:
    end, tries, failures = time.monotonic() + seconds, Counter[str](), Counter[str]()
    while time.monotonic() < end:
        for target in chosen:
            found = tried(target, range(seed, seed + SEEDS_A_PROCESS))
            tries[target.name] += SEEDS_A_PROCESS
            failures[target.name] += len(found)
            for failure in found:
                print(f"{failure.target}, seed {failure.seed}: {failure.what}", flush=True)
        seed += SEEDS_A_PROCESS
    for name, count in tries.items():
        print(f"{name:24} {count:8} tried {failures[name]:6} failed")
    return 1 if failures.total() else 0


def _show(target: Target, seed: int) -> None:
    with changed(target, seed):
        sys.stdout.buffer.write(target.file.read_bytes() + b"\n")
        target.read(target.file)
    sys.exit(0)


if __name__ == "__main__":
    main()
