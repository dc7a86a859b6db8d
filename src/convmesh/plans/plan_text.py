"""A plan as TOML that people read and edit."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from convmesh.plans.split import Split, to_plain

if TYPE_CHECKING:
    from convmesh.plans.plan import Plan

FIELDS = (
    "strategy", "shapes", "batchnorm", "checkpoint", "reduction", "compression", "ranks_per_host", "attention",
    "sub_batches", "precision", "compile", "signature",
)  # fmt: skip
"""Fields of a plan that are keys at the top of its file."""

LEFT_OUT = ("()", "''", "1", "'gather'", "'none'", "False")
"""Defaults that are not written, by their `repr`: 1 and True are equal, but not the same."""


def dumps(plan: Plan) -> str:
    """The plan's text: the most common split as the default for all layers, then the others."""
    lines = [f"# {note}" for note in plan.notes]
    lines += [f"{name} = {_value(getattr(plan, name))}" for name in FIELDS if repr(getattr(plan, name)) not in LEFT_OUT]
    lines += ["", "[mesh]", *(f"{name} = {size}" for name, size in plan.mesh.axes.items())]
    if plan.mesh.shares:
        lines += ["", "[shares]", *(f"{name} = {_value(parts)}" for name, parts in plan.mesh.shares.items())]
    if plan.pipeline is not None:
        stages = ((f.name, getattr(plan.pipeline, f.name)) for f in fields(plan.pipeline))
        lines += ["", "[pipeline]", *(f"{name} = {_value(value)}" for name, value in stages)]
    lines += ["", "[layers]", *(f"{json.dumps(name)} = {_value(to_plain(s))}" for name, s in _listed(plan))]
    return "\n".join(lines) + "\n"


def _listed(plan: Plan) -> list[tuple[str, Split]]:
    """As they are if there are patterns; else the most common split as \"*\", then the layers that differ."""
    if not plan.splits or any("*" in name for name, _ in plan.splits):
        return list(plan.splits)
    common, _ = Counter(split for _, split in plan.splits).most_common(1)[0]
    return [("*", common), *((name, split) for name, split in plan.splits if split != common)]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(v)}" for key, v in value.items()) + " }" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
