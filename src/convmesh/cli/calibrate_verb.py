"""`convmesh calibrate`: measure this machine and save it as the system `local`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from convmesh.cli.exits import BadInputError, Exit
from convmesh.cli.progress import progress
from convmesh.cli.shapes import parse_shape

if TYPE_CHECKING:
    from convmesh.measure.workloads import Workload
    from convmesh.system import System


@dataclass(frozen=True)
class CalibrateOptions:
    """Options of `convmesh calibrate`."""

    models: str = "resnet50,vgg16,cosmoflow,unet3d"
    """Networks whose operators are timed, comma-separated: reference networks or package.module:factory."""
    ranks: str = "1,2,4"
    """Rank counts, comma-separated: shards of plans over these counts and transfers in such groups are timed."""
    input: str | None = None
    """Shape of one sample without the batch, for all networks.
    By default reference networks have their published size on a GPU, and are narrow with small samples on a CPU."""
    batch: int | None = None
    """Global batch size."""
    output: Path | None = None
    """System file to write; by default local.toml in $CONVMESH_SYSTEMS or the user's data folder."""
    quick: bool = False
    """Take seconds instead of minutes: rough figures, to check that everything works."""
    json: bool = False
    """Print the measurements as JSON."""


def run(options: CalibrateOptions) -> int:
    """Measure, write the system file, report."""
    ranks = _ranks(options.ranks)
    if options.batch is not None and options.batch < 1:
        raise BadInputError(f"`--batch` (={options.batch}) must be a positive number of samples.")
    from convmesh.measure.calibrate import Budget, calibrate

    begin = time.monotonic()
    workloads = [_workload(name, options) for name in _names(options.models)]
    budget = Budget.short() if options.quick else Budget()
    system = calibrate(workloads, ranks, output=options.output, budget=budget, progress=progress)
    _report(system, time.monotonic() - begin, options)
    return Exit.DONE


def _ranks(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise BadInputError(f"`--ranks` (={text!r}) must be comma-separated positive numbers, such as 1,2,4.")
    return sorted({int(part) for part in parts})


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise BadInputError(f"`--models` (={text!r}) must name a network, such as resnet50.")
    return names


def _workload(name: str, options: CalibrateOptions) -> Workload:
    import torch

    from convmesh.cli.subjects import find_subject
    from convmesh.measure.workloads import Workload

    if ":" not in name and options.input is None:
        return Workload.reference(name, small=not torch.cuda.is_available(), batch=options.batch)
    subject = find_subject(name, small=False)
    sample = parse_shape("--input", options.input) if options.input else subject.sample
    if sample is None:
        raise BadInputError(f"`--input` is needed for {name!r}: one sample's shape, such as 3x224x224.")
    return Workload(name, subject.model, (options.batch or 4, *sample), subject.task)


def _report(system: System, seconds: float, options: CalibrateOptions) -> None:
    if options.json:
        sys.stdout.write(json.dumps(_plain(system, seconds), indent=2) + "\n")
        return
    timed = 0 if system.operators is None else len(system.operators.timings)
    curves = 0 if system.transfers is None else len(system.transfers.curves)
    sys.stdout.write(
        f"{system}\n\nTimed {timed} operators and {curves} kinds of transfers in {seconds:.0f} s.\n"
        f"Use it with `--system {options.output or 'local'}` or cm.System.load({str(options.output or 'local')!r}).\n"
    )


def _plain(system: System, seconds: float) -> dict[str, object]:
    figures = {
        key: {"value": figure.value, "unit": figure.unit, "origin": figure.origin, "source": figure.source}
        for key, figure in system.figures()
    }
    return {
        "name": system.name,
        "summary": system.summary,
        "seconds": seconds,
        "operators": 0 if system.operators is None else len(system.operators.timings),
        "transfers": 0 if system.transfers is None else len(system.transfers.curves),
        "figures": figures,
    }
