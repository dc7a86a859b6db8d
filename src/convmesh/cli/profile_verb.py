"""`convmesh profile RUN`: where the steps of a run spent their time."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from convmesh.cli.exits import Exit, check_writable


@dataclass(frozen=True)
class ProfileOptions:
    """Options of `convmesh profile`."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run that was trained with `--profile`."""
    trace: Path | None = None
    """Where to write the trace, which ui.perfetto.dev opens; by default profile/trace.json in the run folder."""
    layers: int = 10
    """How many layers to list, the longest first."""
    json: bool = False
    """Print everything as JSON."""


def run(options: ProfileOptions) -> int:
    """Read the ranks' files, write the trace, and show the results."""
    from convmesh.profiling.profile_folder import load_run
    from convmesh.profiling.profile_trace import trace_of
    from convmesh.profiling.rank_profile import FOLDER
    from convmesh.system.saving import write_whole

    profiled = load_run(options.run)
    trace = options.trace or options.run / FOLDER / "trace.json"
    check_writable("--trace", trace)
    write_whole(trace, json.dumps(trace_of(profiled.run, profiled.prediction)) + "\n")

    from convmesh.cli.profile_table import as_plain, as_text

    told = as_plain(profiled, trace)
    sys.stdout.write((json.dumps(told, indent=2) if options.json else as_text(told, options.layers)) + "\n")
    return Exit.DONE
