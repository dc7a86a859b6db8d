"""A system file as a tree of tables; every value carries its file and its origin."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from convmesh.errors import SystemFileError, UnknownNameError
from convmesh.system.figure import ORIGINS

Tree = dict[str, Any]
"""Tables by name; the leaves are entries."""

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

    def inherited_from(self, name: str) -> Entry:
        """The entry in a system that inherits from `name`: any figure of that system is a guess here."""
        if self.inherited:
            return self
        source = f"inherited from {name} ({self.origin}: {self.source})"
        return replace(self, origin="guess", source=source, inherited=name)


@dataclass(slots=True)
class Problems:
    """Collects all problems of a file for one error message."""

    name: str
    lines: list[str] = field(default_factory=list)

    def add(self, file: str, key: str, value: object, rule: str) -> None:
        shown_value = "" if value is None else f" (={value!r})"
        self.lines.append(f"{file}: `{key}`{shown_value} {rule}.")

    def unknown(self, file: str, key: str, known: list[str]) -> None:
        """Add an unknown key, with the nearest known ones."""
        message = str(UnknownNameError.of("key", key.rsplit(".", 1)[-1], known)).split(" is unknown. ")[1]
        self.lines.append(f"{file}: `{key}` is unknown. {message}")

    def raise_any(self) -> None:
        if self.lines:
            number = "a problem" if len(self.lines) == 1 else f"{len(self.lines)} problems"
            lines = "\n".join(f"- {line}" for line in self.lines)
            raise SystemFileError(f"`system` (={self.name!r}) has {number}:\n{lines}")


@dataclass(frozen=True, slots=True)
class TreeBuilder:
    """Turns the tables of one file into a tree."""

    file: str
    sources: dict[str, Any]
    default: Entry
    problems: Problems

    def tree(self, table: dict[str, Any], path: str = "") -> Tree:
        return {key: self._branch(value, f"{path}.{key}" if path else key) for key, value in table.items()}

    def check_default(self, *, stated: bool) -> None:
        """Check the default origin of the file's figures: a stated origin needs a source."""
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
            self.problems.add(self.file, f"{path}.value", None, "is missing: a figure needs a value")
        stated: dict[str, Any] = {key: table[key] for key in _FIGURE_KEYS[2:] if key in table}
        if "origin" in table:
            stated.setdefault("source", "")
        if "from" in table:
            stated = {**self._source(table["from"], path), **stated}
        entry = replace(self.default, value=table.get("value"), **stated)
        self._check(entry, path, stated="origin" in stated)
        return entry

    def _source(self, name: object, path: str) -> dict[str, Any]:
        source = self.sources.get(str(name))
        if not isinstance(source, dict):
            rule = f"must be a key of [sources], which has {', '.join(self.sources) or 'none'}"
            self.problems.add(self.file, f"{path}.from", name, rule)
            return {}
        rest = {key: source.get(key, "") for key in ("date", "inherited")}
        return {"origin": source.get("origin"), "source": source.get("text"), **rest}

    def _check(self, entry: Entry, path: str, *, stated: bool) -> None:
        key = f"{path}." if path else ""
        if entry.origin not in ORIGINS:
            self.problems.add(self.file, f"{key}origin", entry.origin, f"must be one of {', '.join(ORIGINS)}")
        elif stated and not (isinstance(entry.source, str) and entry.source.strip()):
            rule = f"must say where a figure of origin {entry.origin} comes from"
            self.problems.add(self.file, f"{key}source", entry.source, rule)


def _is_figure(table: dict[str, Any]) -> bool:
    """Whether a table is a figure: it has a value, or only one key that is not a figure's (perhaps a typo)."""
    others = set(table) - set(_FIGURE_KEYS)
    return "value" in table or (len(others) < len(table) and len(others) <= 1)


def inherited_tree(tree: Tree, name: str) -> Tree:
    """The whole tree in a system that inherits from `name`."""
    return {
        key: inherited_tree(branch, name) if isinstance(branch, dict) else branch.inherited_from(name)
        for key, branch in tree.items()
    }


def merged(below: Tree, above: Tree, problems: Problems, path: str = "") -> Tree:
    """`above` merged over `below`, table by table; `false` removes a key of `below`."""
    result = dict(below)
    for key, branch in above.items():
        here = f"{path}.{key}" if path else key
        under = below.get(key)
        if isinstance(branch, Entry) and branch.value is False:
            if key not in below:
                problems.add(branch.file, here, False, "removes an inherited key, but none of that name is inherited")
            result.pop(key, None)
        elif isinstance(branch, dict) and isinstance(under, dict):
            result[key] = merged(under, branch, problems, here)
        else:
            result[key] = branch
    return result
