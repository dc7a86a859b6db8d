"""`convmesh export RUN -o FILE`: the trained weights for a single device."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from convmesh.cli.exits import Exit, check_writable


@dataclass(frozen=True)
class ExportOptions:
    """Options of `convmesh export`."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run, of its checkpoints, or of one checkpoint."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """Safetensors file to write."""
    step: int | None = None
    """Checkpoint to export; by default the newest intact one."""
    json: bool = False
    """Print what was written as JSON."""


def run(options: ExportOptions) -> int:
    """Merge the ranks' files into one."""
    check_writable("--output", options.output)
    from convmesh.checkpoint.weights_export import export_weights

    done = export_weights(options.run, options.output, options.step)
    if options.json:
        told = {"step": done.step, "path": str(done.path), "tensors": done.tensors, "bytes": done.bytes_size}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return Exit.DONE
    sys.stdout.write(
        f"Wrote {done.tensors} tensors of step {done.step} to {done.path} ({done.bytes_size / 1e6:.1f} MB).\n"
        f'Load them with model.load_state_dict(safetensors.torch.load_file("{done.path}")).\n'
    )
    return Exit.DONE
