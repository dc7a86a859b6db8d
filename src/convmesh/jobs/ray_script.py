"""An entry point for Ray Train: its workers each start a rank."""

from __future__ import annotations

from convmesh.jobs.cluster_job import ClusterJob

_SCRIPT = '''"""Trains {config} with Ray Train: `python FILE`, or `ray job submit --working-dir . -- python FILE`."""

import os
import socket
import subprocess
import sys

import ray
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

ARGUMENTS = {arguments!r}


def run_rank() -> None:
    """Start this worker's rank as a process of its own, which handles signals and can be lost alone."""
    with socket.socket() as free:
        free.bind(("", 0))
        meeting = [ray.util.get_node_ip_address(), str(free.getsockname()[1])]
    dist.broadcast_object_list(meeting, src=0)  # over Ray's own group: where the first worker is
    environment = {{**os.environ, "MASTER_ADDR": meeting[0], "MASTER_PORT": meeting[1]}}
    subprocess.run([sys.executable, "-m", "convmesh", *ARGUMENTS], env=environment, cwd={folder!r}, check=True)


if __name__ == "__main__":
    TorchTrainer(
        run_rank,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers={workers}, use_gpu={has_gpus}, resources_per_worker={resources!r}),
        # A lost worker starts all of them again, and the run goes on from its last checkpoint.
        run_config=RunConfig(name={name!r}, failure_config=FailureConfig(max_failures=3)),
    ).fit()
'''


def ray_script(job: ClusterJob, folder: str) -> str:
    """A Python file; the run file's paths are relative to `folder`, which all nodes see."""
    resources = {"CPU": job.cores} | ({"GPU": 1} if job.has_gpus else {})
    return _SCRIPT.format(
        config=job.config, arguments=job.command, folder=folder, workers=job.nodes * job.ranks, has_gpus=job.has_gpus,
        resources=resources, name=job.name,
    )  # fmt: skip
