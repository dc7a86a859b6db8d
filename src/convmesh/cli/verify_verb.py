"""`convmesh verify MODEL --ranks N`: is a plan exact for a model?"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from convmesh.cli.exits import BadInputError, Exit
from convmesh.cli.progress import progress
from convmesh.cli.shapes import parse_shape
from convmesh.plans.default_mesh import mesh_for

if TYPE_CHECKING:
    from convmesh.cli.subjects import Subject
    from convmesh.plans import Plan
    from convmesh.verification import Verification

DEFAULT_STRATEGY = "data+spatial"


@dataclass(frozen=True)
class VerifyOptions:
    """Options of `convmesh verify`."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A reference network's name, or package.module:factory."""
    ranks: int
    """Number of ranks to split the model over; if this machine cannot run them all, a smaller mesh is verified."""
    plan: Path | None = None
    """Plan file (TOML) to verify; without it, the strategy decides the plan."""
    strategy: str | None = None
    """data, spatial, filter, channel, hybrid, pipeline, or a pair such as data+spatial, the default."""
    input: str | None = None
    """Shape of one sample without the batch, e.g. 1x64x64x64; reference networks and plan files have a default."""
    batch: int | None = None
    """Global batch size; by default two samples per data-parallel rank and pipeline stage."""
    steps: int = 3
    """Number of training steps."""
    most_ranks: int = 8
    """Maximum number of processes to start."""
    compile: bool = False
    """Verify compiled steps: by losses, gradients and weights, for a model that has a loss."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the split model runs: cuda means all GPUs that torch sees, in float32 without TF32; ranks may share one."""
    small: bool = False
    """Use the narrow version of a reference network, on small samples."""
    json: bool = False
    """Print only JSON on stdout."""


def run(options: VerifyOptions) -> int:
    """Verify, report, and return the verdict as an exit status."""
    _check(options)
    if options.device == "cpu":
        # Ranks are forked, which CUDA does not survive; on CPUs they run the same split operators.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from convmesh.cli.subjects import find_subject
    from convmesh.verification import verify

    subject = find_subject(options.model, options.small)
    plan = _plan(options, subject)
    result = verify(
        subject.model,
        list(plan.shapes),
        plan,
        loss=subject.loss,
        target=subject.target,
        steps=options.steps,
        most_ranks=options.most_ranks,
        compile=options.compile,
        device=options.device,
        progress=progress,
    )
    _report(result, options.json)
    return _status(result)


def _check(options: VerifyOptions) -> None:
    if options.ranks < 1:
        raise BadInputError(f"`--ranks` (={options.ranks}) must be a positive number of processes.")
    if options.batch is not None and options.batch < 1:
        raise BadInputError(f"`--batch` (={options.batch}) must be a positive number of samples.")
    if options.plan is not None and options.strategy is not None:
        raise BadInputError("`--plan` and `--strategy` exclude each other: a plan file says how each layer is cut.")
    if options.input is not None:
        parse_shape("--input", options.input)


def _plan(options: VerifyOptions, subject: Subject) -> Plan:
    from dataclasses import replace

    from convmesh.plans import load_plan
    from convmesh.verification import draft_plan

    if options.plan is None:
        sample = _sample(options, subject)
        strategy = options.strategy or DEFAULT_STRATEGY
        mesh = mesh_for(strategy, options.ranks, len(sample) - 1)
        batch = options.batch or 2 * mesh.extent(("data", "pipe"))
        return draft_plan(subject.model, (batch, *sample), mesh, strategy)
    plan = load_plan(options.plan)
    if plan.mesh.size != options.ranks:
        raise BadInputError(
            f"`--ranks` (={options.ranks}) must be the number of ranks of the plan's mesh: {plan.mesh} in "
            f"{options.plan} has {plan.mesh.size}; use `--ranks {plan.mesh.size}`."
        )
    if plan.shapes and options.input is None and options.batch is None:
        return plan
    shape = (options.batch or (plan.shapes[0][0] if plan.shapes else 2), *_sample(options, subject, plan))
    return plan if plan.shapes and shape == plan.shapes[0] else replace(plan, shapes=(shape, *plan.shapes[1:]))


def _sample(options: VerifyOptions, subject: Subject, plan: Plan | None = None) -> tuple[int, ...]:
    if options.input is not None:
        return parse_shape("--input", options.input)
    if plan is not None and plan.shapes:
        return plan.shapes[0][1:]
    if subject.sample is None:
        raise BadInputError(f"`--input` is needed for {options.model!r}: one sample's shape, such as 3x224x224.")
    return subject.sample


def _report(result: Verification, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(result.to_plain(), indent=2) + "\n")
        return
    from convmesh.cli.verify_table import show

    show(result)


def _status(result: Verification) -> Exit:
    if result.ok:
        return Exit.DONE
    return Exit.BAD_INPUT if result.unsupported else Exit.NOT_EXACT
