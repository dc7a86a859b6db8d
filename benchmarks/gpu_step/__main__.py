"""Whole training steps on one GPU, ConvMesh beside torch's best: bf16 autocast, cuDNN benchmark on.

python -m benchmarks.gpu_step [CASE ...] [--rivals WORD ...] [--out FILE.json]     every rival in its own process
python -m benchmarks.gpu_step --page FILE.json                                     writes the page from a result
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

from benchmarks.gpu_step.page import write_page
from benchmarks.gpu_step.rounds import Rivalling, measure, prepare_all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--rivals", nargs="*", help="only rivals with these names")
    parser.add_argument("--out", type=Path, default=Path("gpu_step.json"))
    parser.add_argument("--logs", type=Path, default=Path("/tmp/gpu_step"))
    parser.add_argument("--prepare-seconds", type=float, default=600, help="limit of all preparations together")
    parser.add_argument("--seconds", type=float, default=3600, help="limit of everything")
    parser.add_argument("--case-seconds", type=float, default=600, help="limit of a case, once compiled")
    parser.add_argument("--wait-for", type=Path, help="begin to measure when this file is there")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.page is not None:
        write_page(json.loads(options.page.read_text()))
    else:
        _measure(options)


def _measure(options: argparse.Namespace) -> None:
    from benchmarks.gpu_step.cases import CASES
    from benchmarks.gpu_step.rivals import RIVALS

    end = time.monotonic() + options.seconds
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    options.logs.mkdir(parents=True, exist_ok=True)
    names = options.rivals or list(RIVALS)
    pairs = [(case, name) for case in options.cases or CASES for name in names if RIVALS[name].fits(CASES[case])]
    rivals = [Rivalling(case, name, options.logs) for case, name in pairs]
    prepare_all(rivals, options.prepare_seconds)
    while options.wait_for is not None and not options.wait_for.exists():
        time.sleep(0.2)
    about = _about()
    for case in dict.fromkeys(rival.case for rival in rivals):
        _measure_case([r for r in rivals if r.case == case], options, end, about)


def _measure_case(rivals: list[Rivalling], options: argparse.Namespace, end: float, about: dict[str, str]) -> None:
    begin = time.monotonic()
    for _ in measure(rivals, min(end, begin + options.case_seconds)):
        _keep(options.out, rivals, about)
    _keep(options.out, rivals, about)
    print(f"{rivals[0].case}: {time.monotonic() - begin:.0f} s", flush=True)


def _about() -> dict[str, str]:
    import torch

    return {
        "date": str(datetime.date.today()),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "command": shlex.join(["python", "-m", "benchmarks.gpu_step", *sys.argv[1:]]),
    }


def _keep(file: Path, rivals: list[Rivalling], about: dict[str, str]) -> None:
    """Write what there is, so that a run that is cut short leaves it behind."""
    held: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"cases": {}}
    held["about"] = about
    held["cases"].setdefault(rivals[0].case, {}).update({rival.name: rival.summary() for rival in rivals})
    file.write_text(json.dumps(held, indent=1))


if __name__ == "__main__":
    main()
