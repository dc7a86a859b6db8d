"""Networks captured only for their shapes: for one batch, without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from convmesh.cli.exits import BadInputError
from convmesh.cli.shapes import parse_shape

if TYPE_CHECKING:
    from convmesh.cli.subjects import Subject
    from convmesh.graph import Captured
    from convmesh.plans.plan import Precision as PlanPrecision

Precision = Literal["float32", "tf32", "bfloat16", "float16", "amp-bf16", "amp-fp16"]

SAMPLES_PER_RANK = {1: 32, 2: 32, 3: 1}
"""Default batch per rank, by number of spatial dims: volumes come one at a time."""


@dataclass(frozen=True, kw_only=True)
class PlannedNetwork:
    """Options of every verb that plans: which network, for which cluster."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A reference network's name, or package.module:factory."""
    system: str = "dgx-a100"
    """The cluster: the name of one that ships with ConvMesh, or the path of your own system file."""
    input: str | None = None
    """Shape of one sample without the batch, e.g. 1x128x128x128; reference networks have a default."""
    precision: Precision = "float32"
    """Type of weights, gradients, optimiser states and activations.
    tf32 is float32 with tensor cores in all products; float32 uses them in convolutions only, as torch does.
    amp-bf16 and amp-fp16 are torch.autocast: weights, gradients and optimiser states stay float32."""
    batchnorm: Literal["global", "replica"] = "global"
    """Batch statistics over the global batch, or over each replica's samples as in DDP."""
    compile: bool = False
    """Price steps as parallelize(compile=True) runs them: fused kernels, launched as a graph."""


def subject_without_data(model: str, given: str | None = None) -> Subject:
    """The network on the meta device, for samples of shape `given`; real weights only where building it needs them."""
    import torch

    from convmesh.cli.subjects import find_subject
    from convmesh.private_torch.plain_numbers import leave_out_symbols
    from convmesh.private_torch.shape_functions import leave_out_the_compiler

    leave_out_the_compiler()
    if ":" not in model:
        leave_out_symbols()  # users' code may want sympy itself, and any part of it
    sample = None if given is None else parse_shape("--input", given)
    try:
        with torch.device("meta"):
            return find_subject(model, small=False, sample=sample)
    except BadInputError:
        return find_subject(model, small=False, sample=sample)


def sample_shape(model: str, subject: Subject, given: str | None) -> tuple[int, ...]:
    """One sample's shape: as typed, or else the network's own."""
    if given is not None:
        return parse_shape("--input", given)
    if subject.sample is None:
        raise BadInputError(f"`--input` is needed for {model!r}: one sample's shape, such as 3x224x224.")
    return subject.sample


def default_batch(sample: tuple[int, ...], ranks: int) -> int:
    """Default global batch for this number of ranks."""
    return ranks * SAMPLES_PER_RANK.get(len(sample) - 1, 1)


def tf32_of(precision: Precision) -> bool | None:
    """Whether matrix products run on tensor cores; None follows torch's default."""
    return True if precision == "tf32" else None


def autocast_of(precision: Precision) -> PlanPrecision:
    """The precision as plans name it: autocast, or else that of the weights."""
    return precision if precision in ("amp-bf16", "amp-fp16") else ""


def captured_for(subject: Subject, shape: tuple[int, ...], precision: Precision) -> Captured:
    """The network captured for a global batch in this precision."""
    import torch

    from convmesh.graph import capture

    if precision in ("bfloat16", "float16"):
        subject.model.to(getattr(torch, precision))
    return capture(subject.model, shape, check=False)
