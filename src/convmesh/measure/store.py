"""Stores calibrations: the system's file, and one table per device that later calibrations extend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from convmesh.errors import SystemFileError
from convmesh.measure.machine import Machine
from convmesh.system import System
from convmesh.system.folder import LOCAL, user_folder
from convmesh.system.operator_table import OperatorTable
from convmesh.system.saving import write_whole
from convmesh.system.transfer_table import TransferTable
from convmesh.system.writing import written

Table = TypeVar("Table", OperatorTable, TransferTable)


@dataclass(frozen=True, slots=True)
class Store:
    """`local.toml`, and the folder of tables next to it."""

    path: Path
    device: str

    @classmethod
    def at(cls, path: Path | None, machine: Machine, *, rough: bool = False) -> Store:
        """The store at `path`, by default in the user's folder; rough tables are kept apart from good ones."""
        chosen = path or user_folder() / f"{LOCAL}.toml"
        if chosen.suffix != ".toml":
            raise SystemFileError(f"`output` (={str(chosen)!r}) must end in .toml, such as {chosen.name}.toml.")
        store = cls(chosen, machine.slug + "-quick" * rough)
        try:
            store._tables.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SystemFileError(f"`output` (={str(chosen)!r}): {error.strerror}.") from None
        return store

    @property
    def _tables(self) -> Path:
        return self.path.parent / "tables"

    def _table(self, kind: str) -> Path:
        return self._tables / f"{self.device}.{kind}.json"

    def operators(self, machine: Machine) -> OperatorTable:
        """The saved operator timings of this device; empty if the table cannot be read."""
        try:
            return OperatorTable.load(self._table("operators"))
        except (OSError, SystemFileError):
            return OperatorTable(machine.kind, ())

    def transfers(self) -> TransferTable | None:
        """The saved transfer timings of this device."""
        try:
            return TransferTable.load(self._table("transfers"))
        except (OSError, SystemFileError):
            return None

    def keep(self, system: System) -> System:
        """Write the system's tables, then the file that names them."""
        named = {key: f"tables/{self._table(key).name}" for key in ("operators", "transfers") if getattr(system, key)}
        for key in named:
            draft = self._table(key).with_suffix(".draft")
            getattr(system, key).save(draft)
            draft.replace(self._table(key))
        write_whole(self.path, written(system, named))
        return replace(system, name=self.path.stem)
