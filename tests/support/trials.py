"""Trying the sample calls: each dim cut in two, compared with a single device on real ranks."""

from __future__ import annotations

from functools import partial

import torch

from convmesh import Mesh, UnsupportedError
from convmesh.dist import OpenMesh
from convmesh.ops import supported
from convmesh.testing import RankPool, check_split, opened
from tests.support.samples import EXTENTS, Sample, sample_of

AXES = {"N": "data", "C": "channel", "D": "depth", "H": "height", "W": "width"}
EXACT, REFUSED, UNTRIED, NO_DIM = "✓", "✗", "?", ""

Cells = tuple[str, ...]

CHUNK = 24
"""Functions in one call of the pool, which has a time limit."""


def try_all(pool: RankPool) -> dict[str, Cells]:
    """By function: the outcome for each dim, the same on both ranks of the pool."""
    names, outcomes = supported(), dict[str, Cells]()
    for begin in range(0, len(names), CHUNK):
        cells, others = pool.run(try_some, names[begin : begin + CHUNK])
        assert cells == others
        outcomes |= cells
    return outcomes


def try_some(names: list[str]) -> dict[str, Cells]:
    """Try some functions, on this rank and its peer."""
    return {name: _cells(name) for name in names}


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
    call = partial(sample.call, mesh=mesh) if sample.takes_mesh else sample.call
    check_split(call, inputs, params, mesh, cuts)


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
