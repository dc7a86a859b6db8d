"""Measured runs as programs: the reference network, planned as it ran and lowered for representative ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from convmesh import models
from convmesh.dist import dry_mesh
from convmesh.errors import ConvMeshError, RunsFileError
from convmesh.graph import Captured, capture
from convmesh.layout import Mesh
from convmesh.lowering.gradient_sums import with_sums
from convmesh.lowering.lower import lower_plan
from convmesh.lowering.lowered import Lowered
from convmesh.planner.planning import plan
from convmesh.planner.predicting import representatives
from convmesh.plans import PresetOptions, Program, Split, preset
from convmesh.system import System
from convmesh.validation import SHIPPED, Validation, read_runs, validate
from convmesh.validation.code_habits import ALIASES, Practice, Variant, network_of, practice_of
from convmesh.validation.measured_run import MeasuredRun
from convmesh.validation.run_pricing import Case

GROUPS = 2
Change = Callable[[Practice], Practice]


def model_names() -> list[str]:
    """The networks that a runs file may name."""
    return sorted({*models.names(), *ALIASES})


def case_of(run: MeasuredRun, change: Change | None = None) -> Case:
    """The run with its system, its code's habits (as changed by `change`) and its programs."""
    habits = practice_of(run.source)
    practice = habits if change is None else change(habits)
    name, variant = network_of(run.model, practice)
    sample = variant.sample or models.find(name).sample
    try:
        programs = _programs(_Problem(run, name, practice, sample))
    except ConvMeshError as error:
        raise RunsFileError(f"run {run.id!r} ({run.model}, {_written(run)}) cannot be planned: {error}") from error
    system = _system(run.system)
    return Case(run, system, practice, programs, math.prod(sample) * 4)


def _written(run: MeasuredRun) -> str:
    return ",".join(f"{part}={ranks}" for part, ranks in run.strategy.items())


@cache
def _system(name: str) -> System:
    return System.load(name)


class _Problem:
    """All that a run's programs depend on; equal problems are lowered once."""

    def __init__(self, run: MeasuredRun, name: str, practice: Practice, sample: tuple[int, ...]) -> None:
        self.run, self.name, self.practice, self.sample = run, name, practice, sample
        self.mesh = run.mesh(len(sample) - 1)
        cut = (practice.least_rows, network_of(run.model, practice)[1].spatial_until)
        self._key = (name, run.model, run.dtype, run.batch, self.mesh, cut, sample)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Problem) and self._key == other._key

    @property
    def variant(self) -> Variant:
        return network_of(self.run.model, self.practice)[1]

    def in_few_groups(self) -> _Problem:
        """The same problem with two groups of the same work; unchanged where more than gradient sums would differ."""
        groups = self.run.strategy.get("data", 1)
        if "pipeline" in self.run.strategy or self.run.batch % groups:
            return self
        fewer = replace(
            self.run, strategy={**self.run.strategy, "data": GROUPS}, batch=self.run.batch // groups * GROUPS
        )
        return _Problem(fewer, self.name, self.practice, self.sample)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.run.batch, *self.sample)


def _programs(problem: _Problem) -> dict[int, Program]:
    """Programs of representative ranks. Groups that share a batch differ only in their gradient sums."""
    lowered = _lowered(problem.in_few_groups())
    if lowered.mesh == problem.mesh:
        return {rank: one.program for rank, one in lowered.ranks.items()}
    return {rank: _on(problem.mesh, rank, one) for rank, one in lowered.ranks.items()}


class _Lowered(NamedTuple):
    mesh: Mesh
    ranks: Mapping[int, Lowered]


@cache
def _lowered(problem: _Problem) -> _Lowered:
    captured = _captured(problem)
    planned = plan(
        captured,
        problem.shape,
        problem.mesh,
        _splits(problem, captured),
        batchnorm="replica",
        least_rows=problem.practice.least_rows,
    )
    return _Lowered(problem.mesh, {rank: lower_plan(planned, rank) for rank in representatives(problem.mesh)})


def _on(mesh: Mesh, rank: int, lowered: Lowered) -> Program:
    """A rank of the first group, on a mesh with another number of groups."""
    sums = {weight: tuple(name for name in axes if name in mesh.axes) for weight, axes in lowered.sum_axes.items()}
    summed = {weight: axes for weight, axes in sums.items() if axes}
    return with_sums(replace(lowered.program, mesh=mesh), summed, dry_mesh(mesh, rank), lowered.plan.summing)


def _captured(problem: _Problem) -> Captured:
    sizes: dict[str, Any] = dict(problem.variant.sizes)
    dtype = getattr(torch, problem.run.dtype)
    with torch.device("meta"):
        network = models.find(problem.name).create(**sizes).to(dtype)
        return capture(network, torch.empty(problem.shape, dtype=dtype), check=False)


def _splits(problem: _Problem, captured: Captured) -> str | dict[str, Split]:
    """A strategy's name, or its splits if it gathers space early and all ranks then do the same."""
    until = problem.variant.spatial_until
    if until is None or problem.run.kind != "data+spatial":
        return problem.run.kind
    options = PresetOptions(least_rows=problem.practice.least_rows)
    splits = preset(problem.run.kind, captured.graph, problem.mesh, options).splits
    layers = list(splits)
    first = next(index for index, layer in enumerate(layers) if layer.startswith(until))
    alike = Split(sample=_samples(problem.mesh))
    return {layer: alike if index >= first else splits[layer] for index, layer in enumerate(layers)}


def _samples(mesh: Mesh) -> tuple[str, ...]:
    return ("data",) if "data" in mesh.axes else ()


def validate_file(path: Path | None = None, change: Change | None = None) -> Validation:
    """The oracle against the measured runs of a file; by default the shipped one."""
    names, systems = model_names(), System.names()
    runs = read_runs(path or SHIPPED["public_runs"], names, systems)
    published = read_runs(SHIPPED["published_anchors"], names, systems)
    return validate(runs, partial(case_of, change=change), published)
