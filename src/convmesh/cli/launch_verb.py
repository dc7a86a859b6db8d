"""`convmesh launch RUN.TOML --slurm`: what starts a run on a cluster, printed; over ssh, started."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from convmesh.cli.exits import BadInputError, Exit
from convmesh.jobs import ClusterJob, hosts_in, kubernetes_manifest, ray_script, slurm_script, start_over_ssh


@dataclass(frozen=True)
class LaunchOptions:
    """Options of `convmesh launch`. Give one of --slurm, --kubernetes, --ray and --ssh."""

    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.TOML")]
    """The run file, or package.module:function for a function that returns a `cm.RunConfig`."""
    slurm: bool = False
    """Print a script for sbatch, which saves before its time is over and requeues itself."""
    kubernetes: bool = False
    """Print a manifest for kubectl: a job of Kubeflow."""
    ray: bool = False
    """Print a Python file for Ray Train."""
    ssh: Path | None = None
    """Start the run on the hosts in this file, one per line: a supervisor on each, which survives lost hosts."""
    run: Path | None = None
    """The run folder, on a file system that all nodes see; by default runs/NAME, after the run file's name."""
    nodes: int = 1
    """Nodes of the cluster; with --ssh the file says how many."""
    ranks: int = 8
    """Ranks on each node, one for each of its GPUs."""
    cores: int = 8
    """Processor cores of each rank."""
    gpus: bool = True
    """Give each rank a GPU; --no-gpus for nodes without any."""
    time: str = "04:00:00"
    """With --slurm: how long the job may take, in SLURM's notation."""
    partition: str = ""
    """With --slurm: the partition; by default the cluster's."""
    account: str = ""
    """With --slurm: the account that pays; by default your own."""
    image: str = "convmesh:latest"
    """With --kubernetes: a container image with ConvMesh in it."""
    claim: str = "convmesh"
    """With --kubernetes: the PersistentVolumeClaim with the run file, mounted as the working folder."""
    api: Literal["trainjob", "pytorchjob"] = "trainjob"
    """With --kubernetes: Kubeflow's Trainer 2 or its Training Operator 1."""
    ssh_command: str = "ssh"
    """With --ssh: the command that reaches a host, with its options, e.g. "ssh -p 2222"."""


def run(options: LaunchOptions) -> int:
    """Check the run file first: a mistake found here costs no time in the queue."""
    _check(options)
    from convmesh.train.config_files import check
    from convmesh.train.config_sources import config_from, run_name

    check(config_from(options.config), options.config)
    folder = options.run or Path("runs") / run_name(options.config)
    job = ClusterJob(options.config, folder, options.nodes, options.ranks, options.cores, options.gpus)
    if options.ssh is not None:
        return start_over_ssh(job, hosts_in(options.ssh), os.getcwd(), shlex.split(options.ssh_command))
    sys.stdout.write(_written(options, job))
    return Exit.DONE


def _written(options: LaunchOptions, job: ClusterJob) -> str:
    if options.slurm:
        return slurm_script(job, options.time, options.partition, options.account)
    if options.kubernetes:
        return kubernetes_manifest(job, options.image, options.claim, options.api)
    return ray_script(job, os.getcwd())


def _check(options: LaunchOptions) -> None:
    chosen = [options.slurm, options.kubernetes, options.ray, options.ssh is not None]
    if sum(chosen) != 1:
        raise BadInputError(
            f"`launch` needs one of --slurm, --kubernetes, --ray and --ssh HOSTS; it got {sum(chosen)}."
        )
    for name in ("nodes", "ranks", "cores"):
        if getattr(options, name) < 1:
            raise BadInputError(f"`--{name}` (={getattr(options, name)}) must be 1 or more.")
    if not re.fullmatch(r"\d+(-\d+)?(:\d+){0,2}", options.time):
        raise BadInputError(f"`--time` (={options.time!r}) must be as SLURM writes it, such as 04:00:00 or 2-12:00:00.")
    for name in ("partition", "account", "image", "claim"):
        if re.search(r"\s", getattr(options, name)):
            raise BadInputError(f"`--{name}` (={getattr(options, name)!r}) must be one word.")
