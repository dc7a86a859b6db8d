"""A system file as a tree: tables as they are, every value with where it was written and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from convmesh.errors import SystemFileError, UnknownNameError
from convmesh.system.figure import ORIGINS

Tree = dict[str, Any]
"""Tables by name; leaves are entries."""

_FIGURE_KEYS = ("value", "from", "origin", "source", "date", "spread", "inherited")


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of a file."""

    value: Any
    file: str
    origin: str = "guess"
    source: str = ""
    date: str = ""
    spread: Any = None
    inherited: str = ""

    def passed_on(self, name: str) -> Entry:
        """The same in a system that inherits from `name`: what holds there is a guess here."""
        if self.inherited:
            return self
        source = f"as {name} has it ({self.origin}: {self.source})"
        return replace(self, origin="guess", source=source, inherited=name)


@dataclass(slots=True)
class Problems:
    """All that is wrong with a file, to be said at once."""

    name: str
    lines: list[str] = field(default_factory=list)

    def add(self, file: str, key: str, value: object, rule: str) -> None:
        given = "" if value is None else f" (={value!r})"
        self.lines.append(f"{file}: `{key}`{given} {rule}.")

    def unknown(self, file: str, key: str, known: list[str]) -> None:
        """A key that stands for nothing, with the nearest ones."""
        message = str(UnknownNameError.of("key", key.rsplit(".", 1)[-1], known)).split(" is unknown. ")[1]
        self.lines.append(f"{file}: `{key}` is unknown. {message}")

    def raise_any(self) -> None:
        if self.lines:
            number = "a problem" if len(self.lines) == 1 else f"{len(self.lines)} problems"
            lines = "\n".join(f"- {line}" for line in self.lines)
            raise SystemFileError(f"`system` (={self.name!r}) has {number}:\n{lines}")


@dataclass(frozen=True, slots=True)
class Planter:
    """Turns the tables of one file into a tree."""

    file: str
    sources: dict[str, Any]
    default: Entry
    problems: Problems

    def tree(self, table: dict[str, Any], path: str = "") -> Tree:
        return {key: self._branch(value, f"{path}.{key}" if path else key) for key, value in table.items()}

    def check_default(self, *, stated: bool) -> None:
        """What figures without an origin of their own get: an origin that is stated needs a source."""
        self._check(replace(self.default, source="" if stated else self.default.source), "", stated=True)

    def _branch(self, value: Any, path: str) -> Tree | Entry:
        if not isinstance(value, dict):
            return replace(self.default, value=value)
        return self._entry(value, path) if _is_figure(value) else self.tree(value, path)

    def _entry(self, table: dict[str, Any], path: str) -> Entry:
        for key in table:
            if key not in _FIGURE_KEYS:
                self.problems.unknown(self.file, f"{path}.{key}", list(_FIGURE_KEYS))
        if "value" not in table:
            self.problems.add(self.file, f"{path}.value", None, "is missing: a figure needs one")
        given: dict[str, Any] = {key: table[key] for key in _FIGURE_KEYS[2:] if key in table}
        if "origin" in table:
            given.setdefault("source", "")
        if "from" in table:
            given = {**self._source(table["from"], path), **given}
        entry = replace(self.default, value=table.get("value"), **given)
        self._check(entry, path, stated="origin" in given)
        return entry

    def _source(self, name: object, path: str) -> dict[str, Any]:
        found = self.sources.get(str(name))
        if not isinstance(found, dict):
            rule = f"must be a key of [sources], which has {', '.join(self.sources) or 'none'}"
            self.problems.add(self.file, f"{path}.from", name, rule)
            return {}
        rest = {key: found.get(key, "") for key in ("date", "inherited")}
        return {"origin": found.get("origin"), "source": found.get("text"), **rest}

    def _check(self, entry: Entry, path: str, *, stated: bool) -> None:
        key = f"{path}." if path else ""
        if entry.origin not in ORIGINS:
            self.problems.add(self.file, f"{key}origin", entry.origin, f"must be one of {', '.join(ORIGINS)}")
        elif stated and not (isinstance(entry.source, str) and entry.source.strip()):
            rule = f"must say where a figure of origin {entry.origin} comes from"
            self.problems.add(self.file, f"{key}source", entry.source, rule)


def _is_figure(table: dict[str, Any]) -> bool:
    """One that has a value, or would have but for a slip; a table of figures has more keys of its own."""
    others = set(table) - set(_FIGURE_KEYS)
    return "value" in table or (len(others) < len(table) and len(others) <= 1)


def passed_on(tree: Tree, name: str) -> Tree:
    """A whole tree as it is inherited from `name`."""
    return {
        key: passed_on(branch, name) if isinstance(branch, dict) else branch.passed_on(name)
        for key, branch in tree.items()
    }


def merged(below: Tree, above: Tree, problems: Problems, path: str = "") -> Tree:
    """`above` over `below`, table by table; `false` takes away what is below."""
    result = dict(below)
    for key, branch in above.items():
        here = f"{path}.{key}" if path else key
        under = below.get(key)
        if isinstance(branch, Entry) and branch.value is False:
            if key not in below:
                problems.add(branch.file, here, False, "takes away an inherited key, and none of that name is there")
            result.pop(key, None)
        elif isinstance(branch, dict) and isinstance(under, dict):
            result[key] = merged(under, branch, problems, here)
        else:
            result[key] = branch
    return result
