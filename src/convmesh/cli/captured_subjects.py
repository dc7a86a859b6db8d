"""Networks of which only shapes matter: captured for a batch, without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from convmesh.cli.exits import BadInputError
from convmesh.cli.shapes import parse_shape

if TYPE_CHECKING:
    from convmesh.cli.subjects import Subject
    from convmesh.graph import Captured

Precision = Literal["float32", "tf32", "bfloat16", "float16"]

SAMPLES_A_RANK = {1: 32, 2: 32, 3: 1}
"""The batch of one rank where none is given, by spatial dims: volumes come one by one."""


def subject_without_data(model: str, given: str | None = None) -> Subject:
    """The network on the meta device, for samples as `given`; one that needs its weights' values is made with them."""
    import torch

    from convmesh.cli.subjects import find_subject

    sample = None if given is None else parse_shape("--input", given)
    try:
        with torch.device("meta"):
            return find_subject(model, small=False, sample=sample)
    except BadInputError:
        return find_subject(model, small=False, sample=sample)


def sample_shape(model: str, subject: Subject, given: str | None) -> tuple[int, ...]:
    """One sample's shape, as typed or as the network knows it."""
    if given is not None:
        return parse_shape("--input", given)
    if subject.sample is None:
        raise BadInputError(f"`--input` is needed for {model!r}: one sample's shape, such as 3x224x224.")
    return subject.sample


def default_batch(sample: tuple[int, ...], ranks: int) -> int:
    """Samples of a global batch for so many ranks."""
    return ranks * SAMPLES_A_RANK.get(len(sample) - 1, 1)


def tf32_of(precision: Precision) -> bool | None:
    """Whether products run on tensor cores: where nothing is said, as torch has it."""
    return True if precision == "tf32" else None


def captured_for(subject: Subject, shape: tuple[int, ...], precision: Precision) -> Captured:
    """The network for a global batch, its numbers as the precision says."""
    import torch

    from convmesh.graph import capture

    if precision in ("bfloat16", "float16"):
        subject.model.to(getattr(torch, precision))
    return capture(subject.model, shape, check=False)
