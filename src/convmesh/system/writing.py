"""Writes a system as a file that `System.load` reads back unchanged and a person can edit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from convmesh.system.figure import Figure, Text, rules
from convmesh.system.units import written_amount

if TYPE_CHECKING:
    from convmesh.system.system import System

_Source = tuple[str, str, str, str]


class _Sources:
    """Names each distinct source of figures, in the order of use."""

    def __init__(self) -> None:
        self._names: dict[_Source, str] = {}

    def name(self, figure: Figure) -> str:
        key = (figure.origin, figure.source, figure.date, figure.inherited)
        alike = sum(origin == figure.origin for origin, *_ in self._names)
        return self._names.setdefault(key, f"{figure.origin}{alike + 1}")

    def lines(self) -> Iterator[str]:
        yield "[sources]"
        for (origin, source, date, inherited), name in self._names.items():
            source_fields = {"origin": origin, "text": source, "date": date, "inherited": inherited}
            yield f"{name} = {_inline({key: value for key, value in source_fields.items() if value})}"


def written(system: System, tables: Mapping[str, str] | None = None) -> str:
    """The file's text; `tables` names the files, relative to it, that hold measured tables."""
    sources = _Sources()
    body = list(_body(system, sources))
    head = [f"summary = {_text(system.summary)}", *(f"tables.{key} = {_text(path)}" for key, path in _pairs(tables))]
    return "\n".join([*head, "", *sources.lines(), *body, ""])


def _pairs(tables: Mapping[str, str] | None) -> list[tuple[str, str]]:
    return sorted((tables or {}).items())


def _body(system: System, sources: _Sources) -> Iterator[str]:
    yield from _table("device", system.device, sources)
    yield from _table("node", system.node, sources)
    for level in system.links:
        yield from _table(f"links.{level.name}", level, sources)
    yield from _table("collectives", system.collectives, sources)
    for method in system.collectives.methods:
        yield from _table(f"collectives.methods.{method.name}", method, sources)
    yield from _table("power", system.power, sources)


def _table(path: str, value: object, sources: _Sources) -> Iterator[str]:
    yield from ("", f"[{path}]")
    kinds = rules(type(value))
    for field in fields(value):  # type: ignore[arg-type]
        member = getattr(value, field.name)
        if isinstance(member, tuple):
            continue
        if isinstance(kinds[field.name], Text):
            yield from [f"{field.name} = {_text(member)}"] * (field.name != "name")
        elif isinstance(member, Mapping):
            yield from (f"{field.name}.{key} = {_figure(figure, sources)}" for key, figure in member.items())
        elif member is not None:
            yield f"{field.name} = {_figure(member, sources)}"


def _figure(figure: Figure, sources: _Sources) -> str:
    parts: dict[str, object] = {"value": written_amount(figure.value, figure.unit), "from": sources.name(figure)}
    if figure.spread is not None:
        parts["spread"] = [written_amount(end, figure.unit) for end in figure.spread]
    return _inline(parts)


def _inline(table: Mapping[str, object]) -> str:
    return "{ " + ", ".join(f"{key} = {_text(value)}" for key, value in table.items()) + " }"


def _text(value: object) -> str:
    """JSON text, which is also valid TOML for strings, numbers and lists."""
    return json.dumps(value, ensure_ascii=False)
