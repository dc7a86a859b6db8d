"""A batch script for SLURM that saves before its time is over and requeues itself."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from convmesh.jobs.cluster_job import ClusterJob

SECONDS_TO_SAVE = 120

_TRAINING = """
# One task is one rank; they meet on the job's first node. A rank that fails ends the step for all.
srun --kill-on-bad-exit=1 {command}
status=$?
# 143: SLURM's signal came, and the run is saved. It goes on when the job's turn comes again.
if [ $status -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
"""


def slurm_script(job: ClusterJob, time: str = "04:00:00", partition: str = "", account: str = "") -> str:
    """The script for `sbatch`."""
    options = "\n".join(f"#SBATCH --{option}" for option in _options(job, time, partition, account))
    training = _TRAINING.format(command=shlex.join(["convmesh", *job.command]))
    return f"#!/bin/bash\n{options}\n{training}"


def _options(job: ClusterJob, time: str, partition: str, account: str) -> Iterator[str]:
    yield f"job-name={job.name}"
    yield f"nodes={job.nodes}"
    yield f"ntasks-per-node={job.ranks}"
    yield f"cpus-per-task={job.cores}"
    if job.has_gpus:
        yield f"gpus-per-node={job.ranks}"
    yield f"time={time}"
    yield f"signal=TERM@{SECONDS_TO_SAVE}"
    yield "requeue"
    yield "open-mode=append"
    yield f"output={job.name}-%j.log"
    if partition:
        yield f"partition={partition}"
    if account:
        yield f"account={account}"
