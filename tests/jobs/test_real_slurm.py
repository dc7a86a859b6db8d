"""The batch script on a real SLURM cluster of one node: ranks train, save at the signal, and the job queues again."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from convmesh.jobs import ClusterJob, slurm_script
from tests.train.one_node_slurm import missing, one_node
from tests.train.test_srun import RUN

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(missing()), reason=missing())]
SECONDS = 300


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with one_node(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def asked(environment: dict[str, str], *command: str, given: str = "") -> str:
    return subprocess.run(command, env=environment, input=given, capture_output=True, text=True, check=True).stdout


def until(what: str, environment: dict[str, str], job: str) -> str:
    """The job's description, as soon as it says `what`."""
    end = time.monotonic() + SECONDS
    while what not in (told := asked(environment, "scontrol", "show", "job", job)):
        assert time.monotonic() < end, told
    return told


def test_a_job_that_is_stopped_is_saved_and_queued_again(cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN.replace("epochs = 3", "epochs = 100000"), encoding="utf-8")
    (tmp_path / "convmesh").write_text(f'#!/bin/sh\nexec {sys.executable} -m convmesh "$@"\n')
    (tmp_path / "convmesh").chmod(0o755)
    environment = {**cluster, "PATH": f"{tmp_path}:{cluster['PATH']}"}
    job = ClusterJob(str(tmp_path / "run.toml"), tmp_path / "run", nodes=1, ranks=2, cores=1, has_gpus=False)
    log = f"--output={tmp_path / 'log'}"
    told = asked(environment, "sbatch", "--oversubscribe", "--chdir=.", log, given=slurm_script(job))
    number = re.findall(r"\d+", told)[0]
    end = time.monotonic() + SECONDS
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert time.monotonic() < end, (tmp_path / "log").read_text() if (tmp_path / "log").exists() else told
    asked(environment, "scancel", "--signal=TERM", number)  # to its steps, as --signal does near the end of its time
    until("Restarts=1", environment, number)
    said = (tmp_path / "log").read_text()
    assert "stopped by signal 15, saved" in said
    assert any((tmp_path / "run" / "checkpoints").iterdir())
    asked(environment, "scancel", number)
