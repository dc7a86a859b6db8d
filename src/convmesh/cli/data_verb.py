"""`convmesh data`: generated samples, better files, and what a file holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from convmesh.cli.exits import Exit

if TYPE_CHECKING:
    from convmesh.data.inspecting import FileFacts

UNITS = ("B", "kB", "MB", "GB", "TB")
NAMES = "say which arrays hold inputs and targets with --inputs and --targets"


@dataclass(frozen=True)
class MakeOptions:
    """Write generated samples to a file, with several processes; a stopped job resumes where it stopped."""

    generator: Annotated[
        Literal["cosmology", "digits", "fractals"], tyro.conf.Positional, tyro.conf.arg(metavar="GENERATOR")
    ]
    """cosmology: random fields, whose spectral index and amplitude are to be regressed. fractals: volumes with a class
    per voxel. digits: handwritten digits."""
    out: Path
    """File to write; its suffix is the format: .h5, .zarr or .npy."""
    size: int | None = None
    """Extent of a sample along each dim."""
    samples: int | None = None
    """Number of samples."""
    seed: int | None = None
    """Seed; every sample is a function of it and of the sample's number."""
    channels: int | None = None
    """Channels (cosmology)."""
    classes: int | None = None
    """Classes, including the background (fractals)."""
    fractals: int | None = None
    """Fractals in a volume (fractals)."""
    split: Literal["train", "test", "all"] | None = None
    """Which digits to write (digits)."""
    processes: int | None = None
    """Processes; by default one per core."""


@dataclass(frozen=True)
class ConvertOptions:
    """Rewrite samples so that every rank can read its part alone: from .nii.gz, .npz, or files with poor chunks."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="IN")]
    """File or folder to read: HDF5, Zarr, .npz, .npy, .b2nd, NIfTI, or a folder with one file per sample."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """File to write; its suffix is the format: .h5, .zarr or .npy."""
    inputs: str = "inputs"
    """Name of the inputs in IN: a dataset, or a folder of files."""
    targets: str = "targets"
    """Name of the targets in IN."""


@dataclass(frozen=True)
class InfoOptions:
    """Show what a file holds, and what it costs ranks to read their parts of a sample."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """File or folder of samples."""
    ranks: int = 4
    """Ranks that a sample is cut over."""
    inputs: str = "inputs"
    """Name of the inputs."""
    targets: str = "targets"
    """Name of the targets."""
    json: bool = False
    """Print the facts as JSON."""


DataOptions = (
    Annotated[MakeOptions, tyro.conf.subcommand("make")]
    | Annotated[ConvertOptions, tyro.conf.subcommand("convert")]
    | Annotated[InfoOptions, tyro.conf.subcommand("info")]
)


def run(options: MakeOptions | ConvertOptions | InfoOptions) -> int:
    """Run one of the three."""
    if isinstance(options, MakeOptions):
        _make(options)
    elif isinstance(options, ConvertOptions):
        _convert(options)
    else:
        _info(options)
    return Exit.DONE


def _make(options: MakeOptions) -> None:
    from convmesh.data.generators.catalogue_of_generators import generator
    from convmesh.data.making import make

    given = {name: value for name, value in asdict(options).items() if value is not None}
    settings = {name: given[name] for name in given if name not in ("generator", "out", "processes")}
    made = generator(options.generator, settings)
    with _bar(f"{options.generator} to {options.out}") as report:
        make(made, options.out, options.processes, report)
    sys.stdout.write(f"{options.out}: {made.samples} samples, inputs {made.input.shape}, targets {made.target.shape}\n")


def _convert(options: ConvertOptions) -> None:
    from convmesh.data.converting import convert

    with _bar(f"{options.source} to {options.out}") as report:
        convert(options.source, options.out, inputs=options.inputs, targets=options.targets, report=report)
    sys.stdout.write(f"{options.out} is written; `convmesh data info {options.out}` shows it.\n")


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal, silence elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    # Drawn when there is news, not by a thread, since processes are forked while it shows.
    with Progress(console=console, auto_refresh=False, disable=not console.is_terminal) as bar:
        task = bar.add_task(title)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, refresh=True)

        yield report


def _info(options: InfoOptions) -> None:
    from convmesh.data.inspecting import inspect_file

    facts = inspect_file(options.file, options.ranks, options.inputs, options.targets)
    sys.stdout.write(json.dumps(_plain(facts), indent=2) + "\n" if options.json else _text(facts))


def _plain(facts: FileFacts) -> dict[str, Any]:
    cuts = [{**asdict(cut), "amplification": cut.amplification} for cut in facts.cuts]
    return {**asdict(facts), "cuts": cuts}


def _text(facts: FileFacts) -> str:
    lines = [f"{facts.path}{_counts(facts)}"]
    lines += [f"  {a.name}  {a.shape} {a.dtype}, {_bytes(a.bytes_decoded)}, {a.storage}" for a in facts.arrays]
    for cut in facts.cuts:
        dear = "" if cut.amplification < 1.5 else f"  (convmesh data convert {facts.path} NEW.h5 saves this)"
        lines.append(
            f"  a rank of {cut.ranks}, {cut.array} cut along {cut.dims}, needs {_bytes(cut.bytes_needed)} of a sample "
            f"and reads {cut.amplification:.2f}× that{dear}"
        )
    return "\n".join([*lines, ""])


def _counts(facts: FileFacts) -> str:
    """How many samples there are, and what prevents training on them."""
    if facts.samples is None:
        return f": {NAMES}"
    samples = f"{facts.samples} sample{'' if facts.samples == 1 else 's'}"
    if facts.targets is None:
        return f": {samples} without targets; {NAMES}"
    if facts.targets != facts.samples:
        return f": {facts.samples} inputs but {facts.targets} targets; each input needs one"
    return f": {samples}"


def _bytes(count: int) -> str:
    power = min(len(UNITS) - 1, max(0, (len(str(count)) - 1) // 3))
    return f"{count / 1000**power:.3g} {UNITS[power]}"
