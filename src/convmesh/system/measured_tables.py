"""Tables measured on a system's device and links, and when a system may use one."""

from __future__ import annotations

from typing import Any

from convmesh.system.file_tree import Entry, Problems, Tree
from convmesh.system.operator_table import OperatorTable
from convmesh.system.transfer_table import TransferTable

TABLES: dict[str, type[OperatorTable | TransferTable]] = {"operators": OperatorTable, "transfers": TransferTable}
"""By field of a system."""

_MEASURED_ON = {"operators": ("device",), "transfers": ("node", "links", "collectives")}
"""Parts that a table was measured on: a system may inherit the table only together with all of them."""


def read_tables(tree: Tree, problems: Problems) -> dict[str, Any]:
    """The tables that a file names and that apply to this system."""
    named = tree.get("tables", {})
    for key in set(named) - set(TABLES):
        problems.unknown(named[key].file, f"tables.{key}", list(TABLES))
    return {key: _load(key, named[key], problems) for key in TABLES if key in named and _applies(key, tree)}


def _applies(key: str, tree: Tree) -> bool:
    table: Entry = tree["tables"][key]
    return not table.inherited or all(_all_inherited(tree.get(part, {})) for part in _MEASURED_ON[key])


def _all_inherited(branch: Tree | Entry) -> bool:
    if isinstance(branch, Entry):
        return bool(branch.inherited)
    return all(_all_inherited(inner) for inner in branch.values())


def _load(key: str, entry: Entry, problems: Problems) -> Any:
    try:
        return TABLES[key].load(entry.value)
    except OSError as error:
        problems.add(entry.file, f"tables.{key}", str(entry.value), f"cannot be read: {error.strerror}")
    return None
