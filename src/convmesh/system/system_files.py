"""Finds system files, and reads one with everything that it inherits and includes."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from convmesh.errors import SystemFileError, UnknownNameError
from convmesh.system.file_tree import Entry, Problems, Tree, TreeBuilder, inherited_tree, merged
from convmesh.system.folder import LOCAL, user_systems
from convmesh.toml_files import NotTomlError, parse_toml

_DATA = files("convmesh.system").joinpath("data")
HEAD = ("summary", "inherits", "includes", "origin", "source", "sources", "tables")
"""Keys that describe the file itself."""


def system_names() -> list[str]:
    """The systems that ship with ConvMesh, and those in the user's folder, such as `local` after calibration."""
    return sorted({*_stems(_DATA), *user_systems()})


def part_names() -> list[str]:
    """Devices and libraries that a system file can include."""
    return _stems(_DATA.joinpath("parts"))


def _stems(folder: Traversable) -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_tree(name_or_path: str | Path, problems: Problems) -> Tree:
    """The file's tree, with inherited entries as guesses and included ones unchanged."""
    return _Reader(problems).system(name_or_path, Path())


def short_name(name_or_path: str | Path) -> str:
    """A system's name, or its file's name without the suffix."""
    return Path(name_or_path).name.removesuffix(".toml")


@dataclass(frozen=True, slots=True)
class _Reader:
    problems: Problems
    chain: list[str] = field(default_factory=list)
    """The files being read; each inherits from the next."""

    def system(self, name_or_path: str | Path, folder: Path) -> Tree:
        path = _find(name_or_path, folder)
        if str(path) in self.chain:
            names = [short_name(link) for link in (*self.chain, str(path))]
            raise SystemFileError(
                f"{short_name(self.chain[-1])}.toml: `inherits` (={str(name_or_path)!r}) leads back to itself: "
                f"{' -> '.join(names)}. Inherit from one of {', '.join(system_names())}, or remove `inherits`."
            )
        self.chain.append(str(path))
        tree = self._read(path, Path(str(path)).parent)
        self.chain.pop()
        return tree

    def _read(self, path: Traversable, folder: Path) -> Tree:
        table = _toml(path)
        tree: Tree = {}
        if "inherits" in table:
            name = table["inherits"]
            if not isinstance(name, str):
                raise SystemFileError(f"{path.name}: `inherits` (={name!r}) must be the name or path of one system.")
            tree = inherited_tree(self.system(name, folder), short_name(name))
        for part in self._parts(table, path.name):
            tree = merged(tree, self._part(_DATA.joinpath("parts", f"{part}.toml")), self.problems)
        return merged(tree, self._tree(table, path), self.problems)

    def _parts(self, table: dict[str, Any], file: str) -> list[str]:
        wanted = table.get("includes", [])
        wanted = wanted if isinstance(wanted, list) else [wanted]
        for name in wanted:
            if name not in part_names():
                self.problems.unknown(file, f"includes.{name}", part_names())
        return [name for name in wanted if name in part_names()]

    def _part(self, path: Traversable) -> Tree:
        return self._tree(_toml(path), path)

    def _tree(self, table: dict[str, Any], path: Traversable) -> Tree:
        file = path.name
        source = table.get("source", f"stated in {file} without an origin")
        default = Entry(None, file, table.get("origin", "guess"), source)
        builder = TreeBuilder(file, self._sources(table, file), default, self.problems)
        builder.check_default(stated="origin" in table and "source" not in table)
        body = {key: value for key, value in table.items() if key not in HEAD}
        about = {"summary": Entry(table.get("summary", ""), file)}
        return builder.tree(body) | about | self._tables(table, path)

    def _tables(self, table: dict[str, Any], path: Traversable) -> Tree:
        """The measured tables; their paths are relative to the file that names them."""
        named = table.get("tables", {})
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            self.problems.add(path.name, "tables", named, "must be a table of paths, relative to the file")
            return {}
        folder = Path(str(path)).parent
        return {"tables": {key: Entry(folder / name, path.name) for key, name in named.items()}} if named else {}

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
        raise UnknownNameError(
            "`system` (='local') does not exist yet: measure this machine with `convmesh calibrate`."
        )
    raise UnknownNameError.of("system", name, [*system_names(), LOCAL])


def _toml(path: Traversable) -> dict[str, Any]:
    try:
        return parse_toml(path.read_bytes())
    except OSError as error:
        raise SystemFileError(f"`system` (={str(path)!r}): {error.strerror}.") from None
    except NotTomlError as error:
        raise SystemFileError(f"{path.name}: {error}.") from None
