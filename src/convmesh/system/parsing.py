"""Turns a tree into values; checks every figure and collects every problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from convmesh.system.figure import Figure, Rule, Text, rules
from convmesh.system.file_tree import Entry, Problems, Tree
from convmesh.system.units import amount

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the tables of one system; its results are complete only if there was no problem."""

    file: str
    problems: Problems

    def value(self, kind: type[T], table: Tree | Entry | None, path: str, **preset: Any) -> T:
        """A dataclass from its table."""
        expected = {key: rule for key, rule in rules(kind).items() if key not in preset}
        table = self._table(table, path)
        if not table:
            return kind(**preset, **dict.fromkeys(expected))
        self.refuse_unknown(table, list(expected), path)
        parsed = {key: self._field(rule, table.get(key), f"{path}.{key}") for key, rule in expected.items()}
        return kind(**preset, **parsed)

    def named(self, kind: type[T], table: Tree | Entry | None, path: str) -> list[T]:
        """Dataclasses from a table of tables; each one's key is its name."""
        entries = self._table(table, path)
        return [self.value(kind, branch, f"{path}.{name}", name=name) for name, branch in entries.items()]

    def refuse_unknown(self, table: Tree, known: list[str], path: str = "") -> None:
        """Report unknown keys."""
        for key, branch in table.items():
            if key not in known:
                self.problems.unknown(_file_of(branch, self.file), f"{path}.{key}".lstrip("."), known)

    def _table(self, table: Tree | Entry | None, path: str) -> Tree:
        if isinstance(table, Entry):
            self.problems.add(table.file, path, table.value, "must be a table")
        elif not table:
            self.problems.add(self.file, path, None, "is missing: add it, or inherit from a system that has it")
        return table if isinstance(table, dict) else {}

    def _field(self, rule: Rule | Text, branch: Tree | Entry | None, path: str) -> Any:
        if isinstance(rule, Text):
            return self._text(rule, branch, path)
        if rule.keys:
            return self._figures(rule, branch, path)
        if branch is None:
            if not rule.optional:
                self.problems.add(
                    self.file, path, None, f"is missing: write a number like {rule.example}, or inherit it"
                )
            return None
        return self._figure(rule, branch, path)

    def _text(self, rule: Text, branch: Tree | Entry | None, path: str) -> str:
        if branch is None and rule.default is not None:
            return rule.default
        value = branch.value if isinstance(branch, Entry) else None
        allowed = f"one of {', '.join(rule.choices)}" if rule.choices else "text"
        if branch is None:
            self.problems.add(self.file, path, None, f"is missing: write {allowed}, or inherit it")
        elif not isinstance(value, str) or not value or (rule.choices and value not in rule.choices):
            self.problems.add(_file_of(branch, self.file), path, value, f"must be {allowed}")
        return str(value)

    def _figures(self, rule: Rule, branch: Tree | Entry | None, path: str) -> dict[str, Figure]:
        if branch is None and rule.optional:
            return {}
        table = self._table(branch, path)
        self.refuse_unknown(table, list(rule.keys), path)
        read = {key: self._figure(rule, table[key], f"{path}.{key}") for key in rule.keys if key in table}
        return {key: figure for key, figure in read.items() if figure is not None}

    def _figure(self, rule: Rule, branch: Tree | Entry, path: str) -> Figure | None:
        if not isinstance(branch, Entry):
            self.problems.add(_file_of(branch, self.file), path, None, "must be a figure, not a table of figures")
            return None
        value = None if branch.value is None else self._amount(rule, branch, branch.value, path)
        if value is None:
            return None
        origin: Any = branch.origin
        spread = self._spread(rule, branch, value, path)
        return Figure(value, rule.unit, origin, branch.source, str(branch.date), spread, branch.inherited)

    def _amount(self, rule: Rule, entry: Entry, written: object, path: str) -> float | None:
        try:
            value = amount(written, rule.unit, rule.example)
        except ValueError as error:
            self.problems.add(entry.file, path, written, str(error))
            return None
        if wrong := rule.broken(value):
            self.problems.add(entry.file, path, written, f"{wrong}, like {rule.example}")
            return None
        return value

    def _spread(self, rule: Rule, entry: Entry, value: float, path: str) -> tuple[float, float] | None:
        if entry.spread is None:
            return None
        if not isinstance(entry.spread, list) or len(entry.spread) != 2:
            self.problems.add(entry.file, f"{path}.spread", entry.spread, "must be two amounts, the lowest first")
            return None
        low, high = (self._amount(rule, entry, end, f"{path}.spread") for end in entry.spread)
        if low is None or high is None:
            return None
        if not low <= value <= high:
            self.problems.add(entry.file, f"{path}.spread", entry.spread, f"must enclose the value (={entry.value!r})")
        return low, high


def _file_of(branch: Tree | Entry | None, default: str) -> str:
    """The file that defines a branch."""
    while isinstance(branch, dict):
        branch = next(iter(branch.values()), None)
    return branch.file if isinstance(branch, Entry) else default
