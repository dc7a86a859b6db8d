"""A training run on several hosts: `convmesh train` on each, as a user starts it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from tests.cluster.cluster import Cluster

ROOT = Path(__file__).parents[2]
PORT = 29400
SECONDS_MOST = 300.0
"""For anything that a test waits for."""

PACE = "CONVMESH_TEST_PACE"
"""In the ranks' environment: the seconds that a step takes at least, so that faults find a run that trains."""

RUN = """
batch = 8
precision = "fp64"
loss = "tests.cluster.training:paced_loss"
model.name = "lenet5"
data.source = "digits"
data.args = { samples = 64 }
data.test_args = { samples = 16 }
plan.predict = false
checkpoint.every_epochs = 0
evaluation.every_epochs = 0
"""


def paced_loss(output: Any, target: Any) -> torch.Tensor:
    """Cross entropy that takes its time without work."""
    time.sleep(float(os.environ.get(PACE, "0")))
    return cross_entropy(output, target)


def await_that(is_so: Callable[[], bool], what: str, seconds: float = SECONDS_MOST) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds} s")
        time.sleep(0.02)


class Training:
    """One run folder, which all hosts see, and a supervisor on each host."""

    def __init__(
        self, cluster: Cluster, folder: Path, options: Sequence[str], ranks: int = 1, places: int = 2, pace: float = 0.0
    ) -> None:
        self.cluster, self.folder, self._ranks = cluster, folder / "run", ranks
        self._file, self._options = folder / "run.toml", list(options)
        self._file.write_text(RUN, encoding="utf-8")
        self._places = ",".join(f"{host.address}:{PORT}" for host in cluster.hosts[:places])
        self._pace = pace
        self.supervisors: dict[int, subprocess.Popen[str]] = {}

    def start(self, index: int, *options: str, environment: Mapping[str, str] | None = None) -> None:
        """The supervisor of a host; what it says goes to the file `said` of the host."""
        command = [
            sys.executable, "-m", "convmesh", "train", str(self._file), "--run", str(self.folder),
            "--ranks", str(self._ranks), "--hosts", str(len(self.cluster.hosts)), "--rendezvous", self._places,
            *self._options, *options,
        ]  # fmt: skip
        paths = [*(environment or {}).get("PYTHONPATH", "").split(":"), str(ROOT / "src"), str(ROOT)]
        own = {"PYTHONPATH": ":".join(filter(None, paths)), "OMP_NUM_THREADS": "1", PACE: str(self._pace)}
        with self.said(index).open("a", encoding="utf-8") as said:
            self.supervisors[index] = self.cluster.hosts[index].start(
                command, env={**os.environ, **(environment or {}), **own}, stdout=said, stderr=said, cwd=ROOT
            )

    def start_all(self) -> None:
        for index in range(len(self.cluster.hosts)):
            self.start(index)

    def start_stranger(self, index: int) -> subprocess.Popen[str]:
        """A run of its own on the same folder, which knows nothing of this one."""
        known = self._places, self.supervisors
        self._places, self.supervisors = "127.0.0.1:1234", {}
        try:
            self.start(index, "--hosts", "1", "--min-ranks", "1")
            return self.supervisors[index]
        finally:
            self._places, self.supervisors = known

    def crash(self, index: int) -> None:
        self.cluster.crash(index)
        self.supervisors.pop(index).wait(SECONDS_MOST)

    def freeze(self) -> None:
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for rank, host in enumerate(self.cluster.hosts):
            with contextlib.suppress(LookupError, ProcessLookupError):
                os.kill(host.rank(rank), number)

    def said(self, index: int) -> Path:
        return self._file.parent / f"said-{self.cluster.hosts[index].name}.txt"

    def told(self) -> str:
        """What all supervisors said."""
        files = [self.said(index) for index in range(len(self.cluster.hosts))]
        return "".join(file.read_text(encoding="utf-8") for file in files if file.exists())

    def step(self) -> int:
        """The last step that the run has noted."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            return int(json.loads((self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])["step"])
        return 0

    def await_step(self, step: int) -> None:
        def is_there() -> bool:
            if self.step() < step and all(each.poll() is not None for each in self.supervisors.values()):
                raise RuntimeError(f"ended before step {step}: {self.told()}")
            return self.step() >= step

        await_that(is_there, f"step {step}")

    def await_words(self, words: str) -> None:
        """Until a supervisor says so."""
        await_that(lambda: words in self.told(), words)

    def ends(self, *indices: int) -> list[int]:
        """The exit statuses of some supervisors, or of all that were started."""
        chosen = indices or tuple(self.supervisors)
        return [self.supervisors[index].wait(SECONDS_MOST) for index in chosen]

    def losses(self) -> list[float]:
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["loss"] for line in lines]

    def events(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
            return [json.loads(line) for line in lines]
        return []
