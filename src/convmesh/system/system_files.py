"""Finding system files, and reading one with all that it inherits and includes."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from convmesh.errors import SystemFileError, UnknownNameError
from convmesh.system.file_tree import Entry, Planter, Problems, Tree, merged, passed_on
from convmesh.system.folder import LOCAL, user_systems
from convmesh.toml_files import NotTomlError, parse_toml

_DATA = files("convmesh.system").joinpath("data")
HEAD = ("summary", "inherits", "includes", "origin", "source", "sources", "tables")
"""Keys of a file that are about the file."""


def system_names() -> list[str]:
    """The systems that ship with ConvMesh, and those in the user's folder: `local`, once it is calibrated."""
    return sorted({*_stems(_DATA), *user_systems()})


def part_names() -> list[str]:
    """Devices and libraries that a system file can include."""
    return _stems(_DATA.joinpath("parts"))


def _stems(folder: Traversable) -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_tree(name_or_path: str | Path, problems: Problems) -> Tree:
    """The file's tree, with what it inherits (as guesses) and includes (as it is)."""
    return _Reader(problems).system(name_or_path, Path())


def short_name(name_or_path: str | Path) -> str:
    """What a system is called: its name, or its file's without the ending."""
    return Path(name_or_path).name.removesuffix(".toml")


@dataclass(frozen=True, slots=True)
class _Reader:
    problems: Problems
    chain: list[str] = field(default_factory=list)
    """The files that are being read, each because the one before it inherits from it."""

    def system(self, name_or_path: str | Path, folder: Path) -> Tree:
        where = _find(name_or_path, folder)
        if str(where) in self.chain:
            names = [short_name(path) for path in (*self.chain, str(where))]
            raise SystemFileError(
                f"{short_name(self.chain[-1])}.toml: `inherits` (={str(name_or_path)!r}) leads back to itself: "
                f"{' -> '.join(names)}. Inherit from one of {', '.join(system_names())}, or from none."
            )
        self.chain.append(str(where))
        tree = self._read(where, Path(str(where)).parent)
        self.chain.pop()
        return tree

    def _read(self, where: Traversable, folder: Path) -> Tree:
        table = _toml(where)
        tree: Tree = {}
        if "inherits" in table:
            name = table["inherits"]
            if not isinstance(name, str):
                raise SystemFileError(f"{where.name}: `inherits` (={name!r}) must be the name or path of one system.")
            tree = passed_on(self.system(name, folder), short_name(name))
        for part in self._parts(table, where.name):
            tree = merged(tree, self._planted(_DATA.joinpath("parts", f"{part}.toml")), self.problems)
        return merged(tree, self._plant(table, where), self.problems)

    def _parts(self, table: dict[str, Any], file: str) -> list[str]:
        wanted = table.get("includes", [])
        wanted = wanted if isinstance(wanted, list) else [wanted]
        for name in wanted:
            if name not in part_names():
                self.problems.unknown(file, f"includes.{name}", part_names())
        return [name for name in wanted if name in part_names()]

    def _planted(self, where: Traversable) -> Tree:
        return self._plant(_toml(where), where)

    def _plant(self, table: dict[str, Any], where: Traversable) -> Tree:
        file = where.name
        source = table.get("source", f"stated in {file} without an origin")
        default = Entry(None, file, table.get("origin", "guess"), source)
        planter = Planter(file, self._sources(table, file), default, self.problems)
        planter.check_default(stated="origin" in table and "source" not in table)
        body = {key: value for key, value in table.items() if key not in HEAD}
        about = {"summary": Entry(table.get("summary", ""), file)}
        return planter.tree(body) | about | self._tables(table, where)

    def _tables(self, table: dict[str, Any], where: Traversable) -> Tree:
        """Measured tables: their paths are relative to the file that names them."""
        named = table.get("tables", {})
        if not isinstance(named, dict) or not all(isinstance(path, str) for path in named.values()):
            self.problems.add(where.name, "tables", named, "must be a table of paths, relative to the file")
            return {}
        folder = Path(str(where)).parent
        return {"tables": {key: Entry(folder / path, where.name) for key, path in named.items()}} if named else {}

    def _sources(self, table: dict[str, Any], file: str) -> dict[str, Any]:
        sources = table.get("sources", {})
        if not isinstance(sources, dict):
            self.problems.add(file, "sources", sources, "must be a table of tables with origin, text and date")
            return {}
        return sources


def _find(name_or_path: str | Path, folder: Path) -> Traversable:
    name = str(name_or_path)
    if name in _stems(_DATA):
        return _DATA.joinpath(f"{name}.toml")
    if name in (own := user_systems()):
        return own[name]
    path = folder / name
    if path.suffix == ".toml" or path.is_file() or isinstance(name_or_path, Path):
        return path.resolve()
    if name == LOCAL:
        raise UnknownNameError("`system` (='local') is not there yet: measure this machine with `convmesh calibrate`.")
    raise UnknownNameError.of("system", name, [*system_names(), LOCAL])


def _toml(where: Traversable) -> dict[str, Any]:
    try:
        return parse_toml(where.read_bytes())
    except OSError as error:
        raise SystemFileError(f"`system` (={str(where)!r}): {error.strerror}.") from None
    except NotTomlError as error:
        raise SystemFileError(f"{where.name}: {error}.") from None
