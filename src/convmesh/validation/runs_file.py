"""Files of measured runs: rows of a CSV as values, with all errors reported at once."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from convmesh.errors import RunsFileError, UnknownNameError
from convmesh.validation.measured_run import MOST, PARTS, PRECISIONS, MeasuredRun, whole_number
from convmesh.validation.paradl_figure import is_figure, rows_of_figure

Row = Mapping[str, str]

NEEDED = ("role", "system", "gpus", "model", "precision", "strategy", "global_batch", "step_ms")
OPTIONAL = ("id", "accelerator", "gpus_per_node", "compute_ms", "contaminated", "source", "note")
ROLES = ("anchor", "test")
MARKS = {"": False, "no": False, "false": False, "0": False, "yes": True, "true": True, "1": True}
_MOST_SHOWN = 40


@dataclass
class _Problems:
    """Errors by row and column."""

    path: Path
    lines: list[str] = field(default_factory=list)

    def add(self, line: int, column: str, value: str, rule: str) -> None:
        stop = "" if rule.endswith("?") else "."
        self.lines.append(f"row {line}, column `{column}` (={value!r}): {rule}{stop}")

    def raise_any(self) -> None:
        if self.lines:
            more = len(self.lines) - _MOST_SHOWN
            shown = [*self.lines[:_MOST_SHOWN], *([f"and {more} more."] if more > 0 else [])]
            listed = "\n".join(f"- {line}" for line in shown)
            raise RunsFileError(f"`{self.path}` cannot be used:\n{listed}")


def read_runs(path: Path, models: Collection[str], systems: Collection[str]) -> list[MeasuredRun]:
    """The runs of a file; rows are numbered as in an editor, the header being row 1."""
    rows = _rows(path)
    problems = _Problems(path)
    reader = _RunsReader(problems, models, systems)
    runs = [run for line, row in rows if (run := reader.run(line, row)) is not None]
    reader.check_ids(runs)
    problems.raise_any()
    return runs


def _rows(path: Path) -> list[tuple[int, Row]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restkey="", restval="", strict=True)
            rows = [(reader.line_num, row) for row in reader]
            header = [name.strip() for name in reader.fieldnames or ()]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RunsFileError(f"`{path}` cannot be read: {why}.") from error
    if is_figure(header):
        return list(rows_of_figure(rows))
    _check_header(path, header)
    if not rows:
        raise RunsFileError(f"`{path}` is empty: the header must be followed by a row for each measured run.")
    return [(line, {name.strip(): value for name, value in row.items() if name}) for line, row in rows]


def _check_header(path: Path, header: list[str]) -> None:
    problems = _Problems(path)
    if not header:
        problems.lines.append(f"the file is empty; its first row must name the columns {', '.join(NEEDED)}.")
    elif missing := [name for name in NEEDED if name not in header]:
        problems.lines += [f"row 1: column `{name}` is missing.{_nearest(name, header)}" for name in missing]
    problems.lines += [f"row 1: column `{name}` occurs twice." for name in header if header.count(name) > 1]
    problems.lines[:] = dict.fromkeys(problems.lines)
    problems.raise_any()


def _nearest(name: str, header: Iterable[str]) -> str:
    unknown = [column for column in header if column not in (*NEEDED, *OPTIONAL)]
    error = str(UnknownNameError.of("column", name, unknown))
    return f" {error.split('is unknown. ')[1]}".replace("Did you mean", "Is it") if "mean" in error else ""


@dataclass
class _RunsReader:
    problems: _Problems
    models: Collection[str]
    systems: Collection[str]

    def run(self, line: int, row: Row) -> MeasuredRun | None:
        """The row as a value; None if it has an error."""
        before = len(self.problems.lines)
        strategy = self._strategy(line, row)
        gpus = self._count(line, row, "gpus")
        self._check_ranks(line, row, strategy, gpus)
        per_node = self._count(line, row, "gpus_per_node") if row.get("gpus_per_node", "").strip() else None
        compute = self._number(line, row, "compute_ms") / 1000 if row.get("compute_ms", "").strip() else None
        values = {
            "role": self._among(line, row, "role", ROLES),
            "system": self._known(line, row, "system", self.systems),
            "model": self._known(line, row, "model", self.models),
            "precision": self._among(line, row, "precision", PRECISIONS),
            "batch": self._count(line, row, "global_batch"),
            "seconds_step": self._number(line, row, "step_ms") / 1000,
            "contaminated": self._mark(line, row),
        }
        if len(self.problems.lines) > before:
            return None
        name = row.get("id", "").strip() or f"row {line}"
        extra = {"gpus_per_node": per_node, "seconds_compute": compute, "source": row.get("source", "").strip()}
        return MeasuredRun(id=name, gpus=gpus, strategy=strategy, **extra, **values)  # type: ignore[arg-type]

    def check_ids(self, runs: list[MeasuredRun]) -> None:
        seen: set[str] = set()
        for run in runs:
            if run.id in seen:
                self.problems.lines.append(f"column `id` (={run.id!r}): two rows have it; give each row its own.")
            seen.add(run.id)

    def _number(self, line: int, row: Row, column: str) -> float:
        text = row[column].strip()
        try:
            value = float(text)
        except ValueError:
            self.problems.add(line, column, text, "must be a number")
            return math.nan
        if not 0 < value < math.inf:
            self.problems.add(line, column, text, "must be more than zero, and finite")
        return value

    def _count(self, line: int, row: Row, column: str) -> int:
        before = len(self.problems.lines)
        value = self._number(line, row, column)
        if len(self.problems.lines) == before and (value != int(value) or value > MOST):
            self.problems.add(line, column, row[column], f"must be a whole number, at most {MOST}")
        return int(value) if math.isfinite(value) else 0

    def _among(self, line: int, row: Row, column: str, known: Collection[str]) -> str:
        value = row[column].strip().lower()
        if value not in known:
            self.problems.add(line, column, row[column], f"must be one of {', '.join(known)}")
        return value

    def _known(self, line: int, row: Row, column: str, known: Collection[str]) -> str:
        value = row[column].strip()
        if value not in known:
            offer = str(UnknownNameError.of(column, value, known)).split("is unknown. ")[1]
            self.problems.add(line, column, value, f"is unknown. {offer.rstrip('.')}")
        return value

    def _mark(self, line: int, row: Row) -> bool:
        value = row.get("contaminated", "").strip().lower()
        if value not in MARKS:
            self.problems.add(line, "contaminated", value, "must be yes, no or empty")
        return MARKS.get(value, False)

    def _strategy(self, line: int, row: Row) -> dict[str, int]:
        parts: dict[str, int] = {}
        for text in row["strategy"].split(","):
            name, _, written = (piece.strip() for piece in text.partition("="))
            ranks = whole_number(written)
            if name not in PARTS or not ranks or name in parts:
                rule = f"must be parts and their ranks, such as data=4,spatial=4; parts are {', '.join(PARTS)}"
                self.problems.add(line, "strategy", row["strategy"], rule)
                return {}
            parts[name] = ranks
        return parts

    def _check_ranks(self, line: int, row: Row, strategy: Mapping[str, int], gpus: int) -> None:
        ranks = math.prod(strategy.values())
        if strategy and gpus > 0 and ranks != gpus:
            rule = f"its parts multiply to {ranks} ranks, but column `gpus` says {gpus}"
            self.problems.add(line, "strategy", row["strategy"], rule)
