"""What a rank does for the process that started it: it ends with it, and shows where it is on request."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys

from convmesh.supervise.pulse import SECONDS_SETTING_UP, Phase, pulse

LAUNCHER, STACKS = "CONVMESH_LAUNCHER", "CONVMESH_STACKS"
"""In a rank's environment: the process that started it, and the file descriptor to which SIGUSR1 writes stacks."""

PARTING = "CONVMESH_PARTING"
"""In a rank's environment: the signal with which it follows a supervisor that dies."""

WANTED = "CONVMESH_RANKS"
"""In a rank's environment: how many ranks the run was started with; there may be fewer now."""

TYPED = "CONVMESH_TYPED"
"""In a rank's environment: the command that the supervisor was started with, as JSON."""

ROOM = signal.SIGUSR2
"""The signal number in the exit status of ranks that made room for more; nobody sends it."""

_PR_SET_PDEATHSIG = 1


def follow_supervisor() -> None:
    """In a rank: stop if the supervisor dies, after saving where possible."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(os.environ[PARTING]))
    if os.getppid() != int(launcher):  # it died before we asked for the signal
        sys.exit(128 + signal.SIGTERM)
    faulthandler.register(signal.SIGUSR1, file=int(os.environ[STACKS]), all_threads=True)
    pulse().beat(Phase.JOINING, seconds=SECONDS_SETTING_UP)


def wanted_ranks() -> int | None:
    """How many ranks this run was started with, if a supervisor may change the number."""
    wanted = os.environ.get(WANTED)
    return None if wanted is None else int(wanted)
