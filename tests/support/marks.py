"""What the operator tests draw: their `operator` marks, by the room of `convmesh.ops` that they test."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from convmesh import Mesh

FOLDER = Path(__file__).parents[1] / "ops"


@dataclass(frozen=True)
class Drawn:
    """One marked test: the operator, the options it draws, and its meshes."""

    operator: str
    options: str
    meshes: tuple[Mesh, ...]

    @property
    def cuts_weights(self) -> bool:
        return any({"channel", "filter"} & {*mesh.axes} for mesh in self.meshes)


def drawn_tests() -> list[Drawn]:
    """All marked tests, by operator."""
    found = {drawn for path in sorted(FOLDER.glob("test_*.py")) for drawn in _of_module(path.stem)}
    return sorted(found, key=lambda drawn: (drawn.operator.lower(), drawn.options))


def _of_module(stem: str) -> Iterator[Drawn]:
    for value in vars(importlib.import_module(f"tests.ops.{stem}")).values():
        marks: list[pytest.Mark] = getattr(value, "pytestmark", [])
        grids = [mark.args[1] for mark in marks if mark.name == "parametrize" and mark.args[0] == "mesh"]
        meshes = tuple(itertools.chain.from_iterable(grids))
        for operator, options in (mark.args for mark in marks if mark.name == "operator"):
            yield Drawn(operator, options, meshes)
