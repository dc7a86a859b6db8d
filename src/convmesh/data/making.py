"""`make`: writes a generator's samples into a file, with several processes."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from convmesh.data.generators.sample_generator import SampleGenerator
from convmesh.data.writing.sample_writer import Report, SampleWriter, silent
from convmesh.data.writing.unfinished import Unfinished
from convmesh.errors import DataError

AHEAD = 4
"""Samples queued in each process at a time."""


def make(
    generator: SampleGenerator,
    path: Path,
    processes: int | None = None,
    report: Report = silent,
) -> None:
    """Write all samples; `report` hears how many are done. A stopped job resumes where it stopped."""
    count = processes or os.cpu_count() or 1
    if count < 1:
        raise DataError(f"`processes` (={processes}) must be at least 1.")
    contents = {"inputs": (generator.samples, generator.input), "targets": (generator.samples, generator.target)}
    file = Unfinished(path, contents, generator.describe())
    done = set(file.done or ())
    left = [index for index in range(generator.samples) if index not in done]
    report(len(done), generator.samples)
    with file.told():
        for number, index in enumerate(_written(generator, file, left, count), len(done) + 1):
            file.mark(index)
            report(number, generator.samples)
        file.finish()


def _written(generator: SampleGenerator, file: Unfinished, left: list[int], processes: int) -> Iterator[int]:
    """The samples, as each is written."""
    waiting = iter(left)
    # Workers only compute and write, so a fork is safe here and saves them the imports.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context, _begin, (generator, file.writer, file.part)) as workers:
        running = {workers.submit(_write, index) for index in itertools.islice(waiting, AHEAD * processes)}
        try:
            while running:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                running |= {workers.submit(_write, index) for index in itertools.islice(waiting, len(finished))}
                yield from (future.result() for future in sorted(finished, key=_has_failed))
        finally:
            workers.shutdown(cancel_futures=True)


def _has_failed(future: Future[int]) -> bool:
    """Sorts failures last: samples written at the same time are noted before a failure ends the job."""
    return future.exception() is not None


_worker: list[tuple[SampleGenerator, SampleWriter]] = []
"""In a worker process: what generates the samples, and what writes them."""


def _begin(generator: SampleGenerator, writer: type[SampleWriter], path: Path) -> None:
    gc.freeze()  # to collect the parent's garbage here would hang: Blosc waits for threads that a fork does not copy
    _worker[:] = [(generator, writer(path))]


def _write(index: int) -> int:
    generator, writer = _worker[0]
    for name, values in zip(("inputs", "targets"), generator.sample(index), strict=True):
        writer.write(name, index, values)
    return index
