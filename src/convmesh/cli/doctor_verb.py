"""`convmesh doctor`: what this machine has, what is missing, what to do; and the same for a model."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convmesh.cli.exits import BadInputError, Exit

if TYPE_CHECKING:
    from convmesh.doctor import Finding, ModelFinding, ModelReport

MARKS = {"ok": "✓", "missing": "-", "broken": "✗"}


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `convmesh doctor`."""

    model: str | None = None
    """Examine this model instead: list everything in it that has no split version. A reference network's name, or
    package.module:factory."""
    input: str | None = None
    """Shape of one sample without the batch, e.g. 3x224x224; reference networks have a default."""
    quick: bool = False
    """Leave out the trial, in which two ranks train a step."""
    json: bool = False
    """Print the findings as JSON."""


def run(options: DoctorOptions) -> int:
    """Print each finding as it is made; the exit status is 2 if something keeps ConvMesh from training."""
    if options.model is not None:
        return _run_model(options.model, options)
    if options.input is not None:
        raise BadInputError(f"`--input` (={options.input}) is the shape of a model's sample; name the `--model`.")
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


def _run_model(name: str, options: DoctorOptions) -> int:
    """Print which parts of a model cannot be split; the exit status is 2 if every strategy refuses some layer."""
    from convmesh.cli.captured_subjects import sample_shape
    from convmesh.cli.subjects import find_subject
    from convmesh.doctor import examine_model

    subject = find_subject(name, small=False)
    report = examine_model(subject.model, sample_shape(name, subject, options.input))
    if options.json:
        sys.stdout.write(json.dumps({"model": name, **report.to_plain()}, indent=2) + "\n")
    else:
        sys.stdout.write("".join(map(_model_line, report.findings)) + _model_ending(name, report))
    return Exit.DONE if report.ok else Exit.BAD_INPUT


def _model_line(finding: ModelFinding) -> str:
    mark = MARKS["broken" if finding.fate == "refused" else "missing"]
    at = f" at {finding.line}" if finding.line else ""
    where = f"{finding.fate} under {', '.join(finding.under)}"
    return f"{mark} {finding.layer} ({finding.op}){at}: {where}\n{'':4}{finding.reason}\n{'':4}→ {finding.advice}\n"


def _model_ending(name: str, report: ModelReport) -> str:
    unfit = "".join(f"- {strategy} does not fit: {why}\n" for strategy, why in report.problems.items())
    closed = sum(finding.fate == "closed" for finding in report.findings)
    refused = len(report.findings) - closed
    if not report.ok:
        return f"{unfit}{name} cannot be split yet: {refused} calls refused, {closed} layers closed.\n"
    how = f"{name} can be split: by {', '.join(report.works_under)}"
    rest = f"; {refused} calls refused elsewhere, {closed} layers closed" if report.findings else ""
    return f"{unfit}{how}{rest}. `convmesh verify {name} --ranks 2` proves it.\n"
