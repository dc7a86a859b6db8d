"""The tree itself: every name stands for one thing, and no late import hides a cycle."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import convmesh

ROOT = Path(convmesh.__file__).parent
MAY_IMPORT_LATE = ("cli", "__init__.py", "graph/__init__.py", "kernels/tuned/conv_ops.py")
"""For start-up time: the command line, and the two packages that load torch on first use; and what runs Triton, which
need not be installed where its operators are known."""


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def test_no_file_name_stands_for_two_things() -> None:
    places = defaultdict(list)
    for path in ROOT.rglob("*.py"):
        if path.stem not in ("__init__", "__main__"):
            places[path.stem].append(path.relative_to(ROOT))
    assert {stem: paths for stem, paths in places.items() if len(paths) > 1} == {}


def test_no_class_name_stands_for_two_things() -> None:
    places = defaultdict(list)
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_late_import_hides_a_cycle() -> None:
    late = [
        f"{path}: {ast.unparse(node)}"
        for path, tree in _trees()
        if path.parts[0] not in MAY_IMPORT_LATE and path.as_posix() not in MAY_IMPORT_LATE
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
        if _imports_convmesh(node)
    ]
    assert late == [], "import at the top of the file; if that is a cycle, move what both need below both"


def _imports_convmesh(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.level > 0 or (node.module or "").split(".")[0] == "convmesh"
    return isinstance(node, ast.Import) and any(name.name.split(".")[0] == "convmesh" for name in node.names)
