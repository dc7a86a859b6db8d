"""`convmesh train RUN.TOML`: train a network as a file says, on one process, on local ranks, or in a job."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from convmesh.cli.exits import BadInputError, Exit
from convmesh.train.run_config import RunConfig


@dataclass(frozen=True)
class TrainOptions:
    """Options of `convmesh train`. Every field of the run file is a flag too."""

    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.TOML")]
    """The run file, or package.module:function for a function that returns a `cm.RunConfig`."""
    run: Path | None = None
    """The run folder; by default runs/NAME, after the run file's name."""
    ranks: int | None = None
    """Number of ranks to start on this machine. Leave it out under torchrun, srun and mpirun: the job's ranks train."""
    elastic: bool = True
    """With --ranks: if ranks die or hang, go on with those left, from the last checkpoint, and grow again later."""
    min_ranks: int = 1
    """Wait for ranks to come back rather than go on with fewer."""
    max_restarts: int = 3
    """Give up after this many consecutive restarts without a new checkpoint."""
    rendezvous: str | None = None
    """HOST:PORT where the supervisors of several hosts meet; HOST serves it. Give it with --ranks on every host. With
    several, HOST1:PORT,HOST2:PORT, they meet at the next one when a host is lost."""
    hosts: int = 1
    """With --rendezvous: how many hosts to wait for before the first step."""
    resume: bool = False
    """Resume from the newest checkpoint in the run folder; if there is none, start from the beginning."""
    profile: bool = False
    """Profile a few steps, for `convmesh profile RUN`; `--profile-steps` says how many."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    """Fields of the run file, e.g. `--optimizer.lr 0.1`; a flag overrides the file."""


def flags() -> Any:
    """How flags become fields of the run file."""
    from convmesh.cli.run_flags import run_flags

    return run_flags()


def parsed(parse: Callable[..., TrainOptions]) -> TrainOptions:
    """The options that were typed, over the fields of the file that they name."""
    from convmesh.cli.run_flags import checked
    from convmesh.train.config_sources import config_from

    typed = parse()
    options = parse(replace(typed, settings=config_from(typed.config)))
    return replace(options, settings=checked(options.settings))


def run(options: TrainOptions) -> int:
    """Train, or start the ranks that do; the exit status is 130 or 143 after Ctrl-C or SIGTERM, saved."""
    from convmesh.launchers import job_place
    from convmesh.train.config_files import check
    from convmesh.train.config_sources import run_name

    options = _profiling(options)
    check(options.settings, options.config)
    ranks = int({**os.environ, **job_place(os.environ)}.get("WORLD_SIZE", "1"))
    in_a_job = "RANK" in os.environ or bool(job_place(os.environ))
    wanted = ranks if options.ranks is None else options.ranks
    if wanted < 1:
        raise BadInputError(f"`--ranks` (={wanted}) must be a positive number of processes.")
    if in_a_job and wanted != ranks:
        raise BadInputError(f"`--ranks` (={wanted}) differs from the {ranks} ranks of this job; leave it out.")
    _check_limits(options, wanted)
    folder = options.run or Path("runs") / run_name(options.config)
    if (wanted > 1 or options.rendezvous) and not in_a_job:
        status = _start(options, folder, wanted)
        return Exit.BAD_INPUT if status == Exit.UNWRITABLE else status
    return _train(options, folder)


def _check_limits(options: TrainOptions, ranks: int) -> None:
    most = ranks * options.hosts
    if options.rendezvous is None and options.hosts != 1:
        raise BadInputError(f"`--hosts` (={options.hosts}) needs `--rendezvous HOST:PORT`, where they meet.")
    if options.rendezvous is not None and not all(map(_is_place, options.rendezvous.split(","))):
        raise BadInputError(
            f"`--rendezvous` (={options.rendezvous!r}) must be HOST:PORT, such as node1:29400, "
            "or several of them with commas between."
        )
    if not 1 <= options.min_ranks <= most:
        raise BadInputError(f"`--min-ranks` (={options.min_ranks}) must be from 1 to {most}, the ranks of the run.")
    if options.max_restarts < 0:
        raise BadInputError(f"`--max-restarts` (={options.max_restarts}) must be 0 or more.")


def _is_place(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host.strip()) and port.strip().isdecimal() and 0 < int(port) < 1 << 16


def _profiling(options: TrainOptions) -> TrainOptions:
    """`--profile` as the field of the run file that it stands for."""
    if not options.profile or options.settings.profile_steps:
        return options
    from convmesh.train.profiling_hook import STEPS

    return replace(options, settings=options.settings.model_copy(update={"profile_steps": STEPS}))


def _train(options: TrainOptions, folder: Path) -> int:
    from convmesh.supervise.following import ROOM, follow_supervisor

    follow_supervisor()
    from convmesh.train.training import train_run

    summary, signal = train_run(options.settings, folder, options.resume)
    if int(os.environ.get("RANK", "0")) == 0 and signal != ROOM:
        from convmesh.cli.train_report import show

        show(summary, folder)
    return 128 + signal if signal else Exit.DONE


def _start(options: TrainOptions, folder: Path, ranks: int) -> int:
    """Start the ranks with one file that says everything, so that all of them read the same."""
    from convmesh.supervise.policy import Job, Policy
    from convmesh.supervise.supervisor import supervise
    from convmesh.train.config_files import resolved_text

    policy = Policy(
        ranks, options.elastic, options.min_ranks, options.max_restarts, options.settings.timeout_seconds
    )  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(resolved_text(options.settings))
        file.flush()
        command = [sys.executable, "-m", "convmesh", "train", file.name, "--run", str(folder)]
        job = Job(command, folder, options.resume)
        if options.rendezvous is None:
            return supervise(job, policy)
        from convmesh.supervise.host_supervisor import supervise_host

        return supervise_host(job, policy, options.rendezvous, options.hosts)
