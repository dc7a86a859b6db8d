"""`convmesh bench batch-sweep`: accuracy and time over batch sizes and ranks."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from convmesh.cli.exits import BadInputError, Exit, check_writable
from convmesh.cli.progress import progress

if TYPE_CHECKING:
    from convmesh.bench.batch_sweep import SweepPoint

BATCHES = (10, 25, 50, 100, 200, 400, 800)


@dataclass(frozen=True)
class BenchOptions:
    """Options of `convmesh bench`."""

    name: Annotated[Literal["batch-sweep"], tyro.conf.Positional, tyro.conf.arg(metavar="batch-sweep")]
    """Train a run file with many batch sizes on several numbers of ranks; a stopped sweep resumes where it stopped."""
    config: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.TOML")]
    """The run file: class labels and a test set, such as examples/digits.toml."""
    batches: tuple[int, ...] = BATCHES
    """Global batch sizes."""
    ranks: tuple[int, ...] = (1, 2, 4)
    """Numbers of ranks on this machine."""
    epochs: int | None = None
    """Epochs of each run; by default as in the run file."""
    out: Path = Path("runs/batch-sweep")
    """Folder of the runs."""
    svg: Path | None = None
    """Where to write the plot; by default sweep.svg in the folder of the runs."""
    json: bool = False
    """Print the results as JSON."""


def run(options: BenchOptions) -> int:
    """Make the missing runs, then show all."""
    from convmesh.bench.batch_sweep import BatchSweep
    from convmesh.bench.sweep_plot import sweep_svg

    _check(options)
    flags = () if options.epochs is None else ("--epochs", str(options.epochs))
    options.out.mkdir(parents=True, exist_ok=True)
    plot = options.svg or options.out / "sweep.svg"
    check_writable("--svg", plot)
    points = list(BatchSweep(options.config, options.out, options.batches, options.ranks, flags).points(progress))
    plot.write_text(sweep_svg(points), encoding="utf-8")
    _show(options, points, plot)
    return Exit.DONE


def _check(options: BenchOptions) -> None:
    if not options.config.is_file():
        raise BadInputError(f"`RUN.TOML` (={str(options.config)!r}): there is no such file; try examples/digits.toml.")
    for name in ("batches", "ranks"):
        counts: tuple[int, ...] = getattr(options, name)
        if not counts or min(counts) < 1:
            raise BadInputError(f"`--{name}` (={counts}) must be positive numbers, e.g. --{name} 1 2 4.")


def _show(options: BenchOptions, points: list[SweepPoint], plot: Path) -> None:
    if options.json:
        sys.stdout.write(json.dumps([asdict(point) for point in points], indent=2) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    from convmesh.bench.batch_sweep import best

    table = Table("ranks", "batch", "test accuracy", "seconds", "ms per step", "samples per second")
    for point in points:
        table.add_row(
            str(point.ranks), str(point.batch), f"{point.accuracy:.2%}", f"{point.seconds_total:.1f}",
            f"{1e3 * point.seconds_step:.1f}", f"{point.samples_per_second:.0f}",
        )  # fmt: skip
    Console().print(table)
    top = best(points)
    sys.stdout.write(
        f"most accurate: batch {top.batch} on {top.ranks} ranks, {top.accuracy:.2%} after {top.seconds_total:.1f} s\n"
        f"plot: {plot}\n"
    )
