"""Reading plans from TOML: every mistake is named."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from convmesh.errors import ConvMeshError, PlanError
from convmesh.layout.mesh import Mesh
from convmesh.plans.plan import Pipeline, Plan
from convmesh.plans.plan_text import FIELDS
from convmesh.plans.split import Split, split_of


def load_plan(path: str | Path) -> Plan:
    """Read a plan that `Plan.save` or a person wrote."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"`path` (={str(path)!r}): {error.strerror}.") from None
    return loads(text, str(path))


def loads(text: str, name: str = "plan") -> Plan:
    """A plan from its text; `name` is what errors call it."""
    try:
        read = tomllib.loads(text)
        return _plan(read)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{name}: not TOML: {error}.") from None
    except (ConvMeshError, TypeError, ValueError) as error:
        raise PlanError(f"{name}: {error}") from None


def _plan(read: dict[str, Any]) -> Plan:
    known = (*FIELDS, "mesh", "pipeline", "layers")
    if unknown := [key for key in read if key not in known]:
        raise PlanError(f"a plan has no {unknown[0]!r}; it has {', '.join(known)}.")
    if not isinstance(read.get("mesh"), dict) or not isinstance(read.get("layers"), dict):
        raise PlanError("a plan needs a [mesh] (axis = ranks) and [layers] (name or pattern = split).")
    given = {key: read[key] for key in FIELDS if key in read}
    given |= {key: _tuples(given[key]) for key in ("shapes", "checkpoint") if key in given}
    mesh = Mesh(**read["mesh"])
    return Plan(
        mesh=mesh,
        splits=tuple((layer, _on_mesh(split_of(v, layer), read["mesh"])) for layer, v in read["layers"].items()),
        pipeline=_pipeline(read["pipeline"]) if "pipeline" in read else None,
        **given,
    )


def _on_mesh(split: Split, mesh: dict[str, int]) -> Split:
    """Axes of one rank cut nothing; axes that the file's mesh does not name are a mistake, which the plan refuses."""
    return split if any(name not in mesh for name in split.axes) else split.on(Mesh(**mesh))


def _pipeline(read: dict[str, Any]) -> Pipeline:
    known = [f.name for f in fields(Pipeline)]
    if unknown := [key for key in read if key not in known]:
        raise PlanError(f"[pipeline] has no {unknown[0]!r}; it has {', '.join(known)}.")
    return Pipeline(**{key: _tuples(value) for key, value in read.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
