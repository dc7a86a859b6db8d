"""The proof: two ranks that train a step of a small network, compared with one process."""

from __future__ import annotations

import time

from torch import nn

from convmesh.doctor.finding import Finding
from convmesh.errors import ConvMeshError
from convmesh.layout import Mesh
from convmesh.planner import plan
from convmesh.testing import RankError
from convmesh.verification import verify

SECONDS_TRIAL = 60.0


def trial() -> Finding:
    """Whether ranks on this machine reach each other and compute a single process's gradients."""
    begin = time.monotonic()
    model, sample = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1)), (2, 1, 8, 8)
    try:
        report = verify(model, sample, plan(model, sample, Mesh(height=2), "spatial"), seconds_timeout=SECONDS_TRIAL)
    except (ConvMeshError, RankError, OSError, TimeoutError) as error:
        advice = "Check that processes may connect to each other over the loopback interface."
        return Finding("two ranks", "broken", f"failed: {error}".splitlines()[0], advice)
    if not report.ok:
        return Finding("two ranks", "broken", "gradients differ from one process's", "Please report this.")
    return Finding("two ranks", "ok", f"train as one process does ({time.monotonic() - begin:.1f} s)")
