"""Cases of the survey, each in a process of its own: what one breaks, or keeps in memory, ends with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from benchmarks.networks.cases import Case
from benchmarks.networks.findings import Finding
from benchmarks.networks.surveying import failure_of, planning, survey

_SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(frozen=True)
class Limits:
    """What a survey may take of the machine."""

    workers: int = 1
    seconds_strategy: float = 300.0
    """The most that one strategy of a network may take."""
    seconds_budget: float = float("inf")
    """Nothing runs after that; a case that would last longer is not begun."""
    gib: float = 12.0
    """The most memory that a process may take. No case begins while less is free."""


class RunningCase:
    """A case on its way, in a process group with its ranks."""

    def __init__(self, case: Case, limits: Limits, is_dry: bool) -> None:
        self.case = case
        self.pipe, theirs = multiprocessing.Pipe()
        self._seconds = limits.seconds_strategy
        self._left = dict.fromkeys(case.strategies)
        self._process = multiprocessing.get_context("fork").Process(
            target=_send_findings, args=(theirs, case, limits.gib, is_dry)
        )
        self._process.start()
        theirs.close()
        self._deadline = time.monotonic() + self._seconds

    @property
    def is_over(self) -> bool:
        return not self._left

    def findings(self) -> list[Finding]:
        """What is new: a finding, or what became of all strategies that are left."""
        if self.pipe.poll():
            return self._received()
        if time.monotonic() > self._deadline:
            return self._rest("unfinished", f"takes longer than {self._seconds:.0f} s here")
        return []

    def _received(self) -> list[Finding]:
        try:
            found = self.pipe.recv()
        except (EOFError, OSError):
            return self._rest("crash", "the process died")
        if not isinstance(found, Finding):
            return self._rest(*found)
        self._left.pop(found.strategy, None)
        self._deadline = time.monotonic() + self._seconds
        return [found]

    def _rest(self, result: str, told: str) -> list[Finding]:
        rest = [Finding(self.case.network.name, strategy, result, told) for strategy in self._left]
        self._left.clear()
        return rest

    def end(self) -> None:
        """Nothing of it is left afterwards, its ranks neither."""
        assert self._process.pid is not None
        for kill in (os.killpg, os.kill):  # the group is there a moment later than the process
            with contextlib.suppress(ProcessLookupError):
                kill(self._process.pid, signal.SIGKILL)
        self._process.join()
        self.pipe.close()


def run_cases(cases: list[Case], limits: Limits, is_dry: bool) -> Iterator[tuple[Case, Finding]]:
    """Findings as they come; cases that do not fit into the time that is left are passed over."""
    ends = time.monotonic() + limits.seconds_budget
    waiting, running = [*cases], list[RunningCase]()
    try:
        while (waiting or running) and time.monotonic() < ends:
            running += _begun(waiting, running, limits, ends, is_dry)
            left = ends - time.monotonic()
            wait([each.pipe for each in running], timeout=min(_SECONDS_BETWEEN_LOOKS, max(0.0, left)))
            for each in [*running]:
                yield from ((each.case, found) for found in each.findings())
                if each.is_over:
                    each.end()
                    running.remove(each)
            if len(running) > 1 and bytes_free() < limits.gib / 4 * 2**30:
                waiting.append(_given_up(running))
    finally:
        for each in running:
            each.end()


def _begun(
    waiting: list[Case], running: list[RunningCase], limits: Limits, ends: float, is_dry: bool
) -> list[RunningCase]:
    """The next cases for idle workers; those that would outlast the budget leave the list."""
    begun: list[RunningCase] = []
    while waiting and len(running) + len(begun) < limits.workers:
        if (running or begun) and bytes_free() < limits.gib * 2**30:
            break
        case = waiting.pop(0)
        if time.monotonic() + case.seconds <= ends:
            begun.append(RunningCase(case, limits, is_dry))
    return begun


def _given_up(running: list[RunningCase]) -> Case:
    """The newest: it is the one that took the last memory, and it has the least to lose."""
    newest = running.pop()
    newest.end()
    return newest.case


def bytes_free() -> int:
    """Memory of this machine that processes can still take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = {name: int(size.split()[0]) * 1024 for name, _, size in (line.partition(":") for line in lines)}
    return free.get("MemAvailable", free.get("MemFree", 2**63))


def _send_findings(pipe: Connection, case: Case, gib: float, is_dry: bool) -> None:
    os.setsid()
    most = int(gib * 2**30)
    with contextlib.suppress(ValueError, OSError):  # a limit that stands already is as good
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        for found in (planning if is_dry else survey)(case.network, [*case.strategies]):
            pipe.send(found)
    except BaseException as error:  # whatever it is, it is a finding
        pipe.send(_told(error))


def _told(error: BaseException) -> tuple[str, str]:
    if isinstance(error, ModuleNotFoundError):
        return "unfinished", f"needs a package that is not here: {error}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return failure_of(f"{type(error).__name__}: {error}"[:250] + f" ({Path(last.filename).name}:{last.lineno})")
