"""Reading plans from TOML: every mistake is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from convmesh.errors import ConvMeshError, PlanError
from convmesh.layout.mesh import Mesh
from convmesh.plans.plan import Pipeline, Plan
from convmesh.plans.plan_text import FIELDS
from convmesh.plans.split import Split, split_of
from convmesh.toml_files import NotTomlError, parse_toml


def load_plan(path: str | Path) -> Plan:
    """Read a plan that was written by `Plan.save` or by hand."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise PlanError(f"`path` (={str(path)!r}): {error.strerror}.") from None
    return loads(data, str(path))


def loads(text: str | bytes, name: str = "plan") -> Plan:
    """A plan from its text; errors call it `name`."""
    try:
        return _plan(parse_toml(text.encode() if isinstance(text, str) else text))
    except NotTomlError as error:
        raise PlanError(f"{name}: {error}.") from None
    except (ConvMeshError, TypeError, ValueError) as error:
        raise PlanError(f"{name}: {error}") from None


def _plan(read: dict[str, Any]) -> Plan:
    keys = (*FIELDS, "mesh", "shares", "pipeline", "layers")
    if unknown := [key for key in read if key not in keys]:
        raise PlanError(f"a plan has no {unknown[0]!r}; it has {', '.join(keys)}.")
    if not isinstance(read.get("mesh"), dict) or not isinstance(read.get("layers"), dict):
        raise PlanError("a plan needs a [mesh] (axis = ranks) and [layers] (name or pattern = split).")
    for key, kind in _KINDS.items():
        _check_kind(key, read.get(key), kind)
    fields_read = {key: read[key] for key in FIELDS if key in read}
    fields_read |= {key: _tuples(fields_read[key]) for key in ("shapes", "checkpoint") if key in fields_read}
    mesh = Mesh(**read["mesh"]).with_shares(**read.get("shares", {}))
    return Plan(
        mesh=mesh,
        splits=tuple((layer, _on_mesh(split_of(v, layer), read["mesh"])) for layer, v in read["layers"].items()),
        pipeline=_pipeline(read["pipeline"]) if "pipeline" in read else None,
        **fields_read,
    )


def _on_mesh(split: Split, mesh: dict[str, int]) -> Split:
    """Drop axes of one rank, which cut nothing. Axes that the file's mesh does not name stay: the plan refuses them."""
    return split if any(name not in mesh for name in split.axes) else split.on(Mesh(**mesh))


def _check_kind(key: str, value: Any, kind: str) -> None:
    if value is not None and not _IS_KIND[kind](value):
        raise PlanError(f"`{key}` (={value!r}) must be {kind}.")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_list(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(of(each) for each in value)


_IS_KIND: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "true or false": lambda value: isinstance(value, bool),
    "a list of texts": _is_list(lambda value: isinstance(value, str)),
    "a list of shapes": _is_list(_is_list(_is_count)),
    "a positive whole number": _is_count,
    "a table": lambda value: isinstance(value, dict),
    "a table of lists of positive whole numbers": lambda value: (
        isinstance(value, dict) and all(map(_is_list(_is_count), value.values()))
    ),
}

_KINDS = {
    "strategy": "text",
    "shapes": "a list of shapes",
    "batchnorm": "text",
    "checkpoint": "a list of texts",
    "reduction": "text",
    "compression": "text",
    "ranks_per_host": "a positive whole number",
    "attention": "text",
    "sub_batches": "a positive whole number",
    "precision": "text",
    "compile": "true or false",
    "signature": "text",
    "shares": "a table of lists of positive whole numbers",
    "pipeline": "a table",
}
_PIPELINE_KINDS = {"starts": "a list of texts", "microbatches": "a positive whole number", "schedule": "text"}


def _pipeline(read: dict[str, Any]) -> Pipeline:
    for key, kind in _PIPELINE_KINDS.items():
        _check_kind(f"pipeline.{key}", read.get(key), kind)
    keys = [f.name for f in fields(Pipeline)]
    if unknown := [key for key in read if key not in keys]:
        raise PlanError(f"[pipeline] has no {unknown[0]!r}; it has {', '.join(keys)}.")
    return Pipeline(**{key: _tuples(value) for key, value in read.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
