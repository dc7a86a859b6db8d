"""Fields of a run file that take the names of plans: what no plan knows is one of the file's mistakes."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from convmesh.layout.mesh import AXES
from convmesh.plans.presets import STRATEGIES
from convmesh.train.flag_tables import Counts


def _of(known: Sequence[str], name: str) -> str:
    """The names that there are, and the nearest one."""
    near = difflib.get_close_matches(name, known, 1)
    return f"{', '.join(known)}{f'; did you mean {near[0]}?' if near else ''}"


def _strategy(name: str) -> str:
    if name == "auto" or name in STRATEGIES or name.endswith(".toml"):
        return name
    raise PydanticCustomError("strategy", f"must be a plan file (.toml), or one of {_of(('auto', *STRATEGIES), name)}")


def _axes(mesh: dict[str, int]) -> dict[str, int]:
    for name, size in mesh.items():
        if name not in AXES:
            raise PydanticCustomError("axis", f"must name axes among {_of(AXES, name)}")
        if size < 1:
            raise PydanticCustomError("ranks", f"must have at least 1 rank along {name}; leave the axis out for 1")
    return mesh


Strategy = Annotated[str, AfterValidator(_strategy)]

Axes = Annotated[Counts, AfterValidator(_axes)]
"""A mesh by the sizes of its axes."""
