"""A SLURM cluster of this machine alone: its three daemons, with files in a folder of their own."""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "scancel", "sinfo")
SECONDS_TO_START, SECONDS_TO_END = 60.0, 30.0


def missing() -> str:
    """Which of SLURM's programs this machine lacks, for the line of a skipped test."""
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))
    lacking = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if not lacking and os.geteuid() != 0:
        return "slurmd starts tasks as root only"
    return f"there is no {', '.join(lacking)}: apt-get install slurmctld slurmd munge" if lacking else ""


@contextmanager
def one_node(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which `srun` finds a running cluster."""
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin", "SLURM_CONF": str(folder / "slurm.conf")}
    (folder / "slurm.conf").write_text(_settings(folder), encoding="utf-8")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    for name in ("spool", "state"):
        (folder / name).mkdir()
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in (_munged(folder), ["slurmctld", "-D"], ["slurmd", "-D"]):
            with (folder / f"{command[0]}.out").open("wb") as log:
                daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
            if command[0] == "munged":
                _wait((folder / "munge.sock").exists, folder)
        _wait(lambda: _is_idle(environment), folder)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:  # slurmd can wait for a controller that does not answer
                daemon.kill()
                daemon.wait()


def _munged(folder: Path) -> list[str]:
    files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    options = [f"--{name}={folder / file}" for name, file in {**files, "log-file": "munge.log"}.items()]
    return ["munged", "--foreground", "--force", *options]  # by force: folders of tests may be written by others


def _settings(folder: Path) -> str:
    host, user = platform.node().partition(".")[0], getpass.getuser()
    lines = {
        "ClusterName": "one",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": str(_free_port()),
        "SlurmdPort": str(_free_port()),
        "SlurmUser": user,
        "SlurmdUser": user,
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder / 'munge.sock'}",
        "StateSaveLocation": str(folder / "state"),
        "SlurmdSpoolDir": str(folder / "spool"),
        "SlurmctldPidFile": str(folder / "slurmctld.pid"),
        "SlurmdPidFile": str(folder / "slurmd.pid"),
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "ReturnToService": "2",
        "MailProg": "/bin/true",
        "NodeName": f"{host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN",
        "PartitionName": f"all Nodes={host} Default=YES State=UP",
    }
    return "".join(f"{name}={value}\n" for name, value in lines.items())


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _is_idle(environment: dict[str, str]) -> bool:
    asked = ["sinfo", "--noheader", "--format=%t"]
    return "idle" in subprocess.run(asked, env=environment, capture_output=True, text=True, check=False).stdout


def _wait(is_so: Callable[[], bool], folder: Path) -> None:
    end = time.monotonic() + SECONDS_TO_START
    while not is_so():
        if time.monotonic() > end:
            told = "\n".join(path.read_text(errors="replace") for path in folder.glob("*.out"))
            raise TimeoutError(f"SLURM did not start:\n{told}")
        time.sleep(0.1)
