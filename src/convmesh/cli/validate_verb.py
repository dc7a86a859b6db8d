"""`convmesh validate RUNS.csv`: compare the oracle with measured runs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from convmesh.cli.exits import Exit


@dataclass(frozen=True)
class ValidateOptions:
    """Options of `convmesh validate`."""

    runs: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUNS.csv")] = None
    """Measured runs, with the columns of docs/accuracy.md; by default the public runs that ship with ConvMesh."""
    json: bool = False
    """Print only JSON on stdout."""


def run(options: ValidateOptions) -> int:
    """Predict the file's test runs and print the accuracy."""
    from convmesh.validation.run_programs import validate_file

    validation = validate_file(options.runs)
    if options.json:
        sys.stdout.write(json.dumps(validation.to_plain(), indent=2) + "\n")
        return Exit.DONE
    from convmesh.cli.validate_table import show

    show(validation)
    return Exit.DONE
