"""`convmesh doctor`: what this machine has, what is missing, what to do."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convmesh.cli.exits import Exit

if TYPE_CHECKING:
    from convmesh.doctor import Finding

MARKS = {"ok": "✓", "missing": "-", "broken": "✗"}


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `convmesh doctor`."""

    quick: bool = False
    """Leave out the trial, in which two ranks train a step."""
    json: bool = False
    """Print the findings as JSON."""


def run(options: DoctorOptions) -> int:
    """Print each finding as it comes; the exit status is 2 if something keeps ConvMesh from training."""
    from convmesh.doctor import examine

    findings = []
    for finding in examine(with_trial=not options.quick):
        findings.append(finding)
        if not options.json:
            sys.stdout.write(_line(finding))
            sys.stdout.flush()
    broken = [finding.topic for finding in findings if finding.state == "broken"]
    if options.json:
        told = {"ok": not broken, "findings": [finding.to_plain() for finding in findings]}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        ending = f"cannot train here: {', '.join(broken)}" if broken else "can train here"
        sys.stdout.write(f"ConvMesh {ending}.\n")
    return Exit.BAD_INPUT if broken else Exit.DONE


def _line(finding: Finding) -> str:
    advice = f"\n{'':18}→ {finding.advice}" if finding.advice else ""
    return f"{MARKS[finding.state]} {finding.topic:15} {finding.text}{advice}\n"
