"""Trying the sample calls: each dim cut in two, compared with a single device on real ranks."""

from __future__ import annotations

import torch

from convmesh import Mesh, UnsupportedError
from convmesh.dist import OpenMesh
from convmesh.ops import supported
from convmesh.testing import check_split, opened
from tests.support.samples import EXTENTS, Sample, sample_of, use_masks_of

AXES = {"N": "data", "C": "channel", "D": "depth", "H": "height", "W": "width"}
EXACT, REFUSED, UNTRIED, NO_DIM = "✓", "✗", "?", ""

Cells = tuple[str, ...]


def try_all() -> dict[str, Cells]:
    """By function: the outcome for each dim. Run it on both ranks of a pool of two."""
    return {name: _cells(name) for name in supported()}


def _cells(name: str) -> Cells:
    sample = sample_of(name)
    if sample is None:
        return (UNTRIED,) * len(AXES)
    return tuple(_outcome(name, sample, label) if label in sample.labels[0] else NO_DIM for label in AXES)


def _outcome(name: str, sample: Sample, label: str) -> str:
    """✓ if output and gradients are a single device's, ✗ if the function refuses; anything else is an error."""
    axis = AXES[label]
    try:
        _check(sample, opened(Mesh(**{axis: 2})), label, axis)
    except UnsupportedError:
        return REFUSED
    except Exception as error:
        raise AssertionError(f"{name} with {label} cut: {error}") from error
    return EXACT


def _check(sample: Sample, mesh: OpenMesh, label: str, axis: str) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [_drawn(shape, generator) for shape in sample.shapes]
    if sample.classes:
        inputs[-1] = torch.randint(0, EXTENTS["C"], sample.shapes[-1], generator=generator)
    params = [_drawn(shape, generator) for shape in sample.params]
    cuts = [{labels.index(label): axis} if label in labels else {} for labels in sample.labels]
    use_masks_of(mesh)
    check_split(sample.call, inputs, params, mesh, cuts)


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
