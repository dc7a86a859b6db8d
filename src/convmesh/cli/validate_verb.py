"""`convmesh validate RUNS.csv`: the oracle against measured runs."""

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
    """What can be typed after `convmesh validate`."""

    runs: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUNS.csv")] = None
    """Measured runs, in the columns that docs/accuracy.md names; without it the public runs that come with ConvMesh."""
    json: bool = False
    """Print the result as JSON, and nothing else, on stdout."""


def run(options: ValidateOptions) -> int:
    """Predict the file's test runs and print how near that came."""
    from convmesh.validation.run_programs import validate_file

    found = validate_file(options.runs)
    if options.json:
        sys.stdout.write(json.dumps(found.to_plain(), indent=2) + "\n")
        return Exit.DONE
    from convmesh.cli.validate_table import show

    show(found)
    return Exit.DONE
