"""`convmesh launch --ssh` starts a supervisor on every host, shows what it says, and hands Ctrl-C on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# A stand-in for ssh -tt HOST LINE: it runs the line here, at a terminal of its own, as sshd does.
SSH = """
import os, pty, sys
assert sys.argv[1] == "-tt"
os.environ["PATH"] = {bin!r} + ":" + os.environ["PATH"]
os.environ["STANDS_FOR"] = sys.argv[2]
sys.exit(os.waitstatus_to_exitcode(pty.spawn(["sh", "-c", sys.argv[3]])))
"""
SUPERVISOR = """#!/bin/sh
trap 'echo saved; exit 130' INT
echo "$STANDS_FOR runs $*"
{then}
"""


def launched(tmp_path: Path, then: str) -> subprocess.Popen[str]:
    (tmp_path / "run.toml").write_text('batch = 8\n[model]\nname = "lenet5"\n')
    (tmp_path / "hosts.txt").write_text("node1\nuser@node2\n")
    (tmp_path / "ssh.py").write_text(SSH.format(bin=str(tmp_path)))
    (tmp_path / "convmesh").write_text(SUPERVISOR.format(then=then))
    (tmp_path / "convmesh").chmod(0o755)
    command = [sys.executable, "-m", "convmesh", "launch", "run.toml", "--ssh", "hosts.txt", "--ranks", "2"]
    ssh = f"{sys.executable} {tmp_path / 'ssh.py'}"
    call = [*command, "--ssh-command", ssh]
    return subprocess.Popen(call, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env={**os.environ})


def test_every_host_gets_a_supervisor(tmp_path: Path) -> None:
    process = launched(tmp_path, then='[ "$STANDS_FOR" = node1 ] || exit 3')
    said, _ = process.communicate(timeout=300)
    line = "train run.toml --run runs/run --resume --ranks 2 --hosts 2 --rendezvous node1:29400,node2:29400"
    assert sorted(said.splitlines()) == [f"node1: node1 runs {line}", f"user@node2: user@node2 runs {line}"]
    assert process.returncode == 3


@pytest.mark.parametrize(("reached", "status"), [("exit 0", 0), ("exit 3", 3), ("exit 255", 255)])
def test_a_host_that_ssh_loses_is_not_the_end(reached: str, status: int, tmp_path: Path) -> None:
    """The other one may have brought the run to its end."""
    process = launched(tmp_path, then=f'[ "$STANDS_FOR" = node1 ] && exit 255; {reached}')
    process.communicate(timeout=300)
    assert process.returncode == status


def test_an_interrupt_reaches_the_supervisors(tmp_path: Path) -> None:
    process = launched(tmp_path, then="while :; do read -r _; done")
    assert process.stdout is not None
    said = [process.stdout.readline(), process.stdout.readline()]
    assert all("runs train" in line for line in said)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=300)
    assert sum(line.endswith("saved") for line in rest.splitlines()) == 2
    assert process.returncode == 130
