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
    """Read a plan that was written by `Plan.save` or by hand."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"`path` (={str(path)!r}): {error.strerror}.") from None
    return loads(text, str(path))


def loads(text: str, name: str = "plan") -> Plan:
    """A plan from its text; errors call it `name`."""
    try:
        read = tomllib.loads(text)
        return _plan(read)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{name}: not TOML: {error}.") from None
    except (ConvMeshError, TypeError, ValueError) as error:
        raise PlanError(f"{name}: {error}") from None


def _plan(read: dict[str, Any]) -> Plan:
    keys = (*FIELDS, "mesh", "pipeline", "layers")
    if unknown := [key for key in read if key not in keys]:
        raise PlanError(f"a plan has no {unknown[0]!r}; it has {', '.join(keys)}.")
    if not isinstance(read.get("mesh"), dict) or not isinstance(read.get("layers"), dict):
        raise PlanError("a plan needs a [mesh] (axis = ranks) and [layers] (name or pattern = split).")
    fields_read = {key: read[key] for key in FIELDS if key in read}
    fields_read |= {key: _tuples(fields_read[key]) for key in ("shapes", "checkpoint") if key in fields_read}
    mesh = Mesh(**read["mesh"])
    return Plan(
        mesh=mesh,
        splits=tuple((layer, _on_mesh(split_of(v, layer), read["mesh"])) for layer, v in read["layers"].items()),
        pipeline=_pipeline(read["pipeline"]) if "pipeline" in read else None,
        **fields_read,
    )


def _on_mesh(split: Split, mesh: dict[str, int]) -> Split:
    """Drop axes of one rank, which cut nothing. Axes that the file's mesh does not name stay: the plan refuses them."""
    return split if any(name not in mesh for name in split.axes) else split.on(Mesh(**mesh))


def _pipeline(read: dict[str, Any]) -> Pipeline:
    keys = [f.name for f in fields(Pipeline)]
    if unknown := [key for key in read if key not in keys]:
        raise PlanError(f"[pipeline] has no {unknown[0]!r}; it has {', '.join(keys)}.")
    return Pipeline(**{key: _tuples(value) for key, value in read.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
