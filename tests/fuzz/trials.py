"""Trials of changed files, in processes of their own: a reader may crash, hang, or take all memory."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from convmesh.errors import ConvMeshError
from tests.fuzz.mutation import mutated
from tests.fuzz.targets import Target

SECONDS_MOST = 20
BYTES_MOST = 2 << 30
"""That a process may take on top of what it has."""


@dataclass(frozen=True)
class Failure:
    """A changed file that ended in something else than a value or one of our errors."""

    target: str
    seed: int
    what: str


def tried(target: Target, seeds: range) -> list[Failure]:
    """Each seed is one changed file. A process that ends early is the fault of the seed it had begun."""
    failures: list[Failure] = []
    while seeds:
        told, status = _in_a_process(target, seeds)
        failures += [Failure(target.name, seed, what) for seed, what in told if what]
        if status == 0:
            break
        last = told[-1][0] + 1 if told else seeds.start
        failures.append(Failure(target.name, last, f"the process ended with {_ending(status)}"))
        seeds = range(last + 1, seeds.stop)
    return failures


def _ending(status: int) -> str:
    return signal.Signals(status & 127).name if status & 127 else f"status {status >> 8}"


def _in_a_process(target: Target, seeds: range) -> tuple[list[tuple[int, str]], int]:
    """What each seed came to, and how the process ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _limit()
        with os.fdopen(writing, "w") as pipe:
            for seed in seeds:
                pipe.write(json.dumps([seed, _come_to(target, seed)]) + "\n")
                pipe.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = [tuple(json.loads(line)) for line in pipe if line.endswith("\n")]
    return told, os.waitpid(child, 0)[1]


def _limit() -> None:
    faulthandler.disable()  # how a process ended is told by its parent
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + BYTES_MOST
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)


def _come_to(target: Target, seed: int) -> str:
    """Nothing where all is well, or what went wrong."""
    with changed(target, seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        signal.alarm(SECONDS_MOST)
        try:
            target.read(target.file)
        except ConvMeshError as error:
            return "" if str(error) and len(str(error)) < 1 << 16 else f"a message of {len(str(error))} characters"
        except BaseException:
            return traceback.format_exc()
        finally:
            signal.alarm(0)
    return ""


@contextmanager
def changed(target: Target, seed: int) -> Iterator[None]:
    """With the file as a seed changes it."""
    original = target.file.read_bytes()
    try:
        target.file.write_bytes(target.sealed(mutated(original, random.Random(f"{target.name} {seed}"))))
        yield
    finally:
        target.file.write_bytes(original)
