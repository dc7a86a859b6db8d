"""Examines everything."""

from __future__ import annotations

from collections.abc import Iterator

from convmesh.doctor.finding import Finding
from convmesh.doctor.host_findings import hardware
from convmesh.doctor.library_findings import software
from convmesh.doctor.trial import trial


def examine(with_trial: bool = True) -> Iterator[Finding]:
    """Findings as they are made; the trial, which takes seconds, comes last."""
    yield from software()
    yield from hardware()
    if with_trial:
        yield trial()
