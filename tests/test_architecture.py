"""docs/architecture.md describes the tree as it is."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "convmesh"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_package_is_named() -> None:
    packages = {f"{path.parent.relative_to(SOURCE)}/" for path in SOURCE.rglob("__init__.py")} - {"./"}
    named = set(re.findall(r"^\| `([\w/]+/)` \|", PAGE, re.MULTILINE))
    assert named == packages


def test_every_path_exists() -> None:
    paths = re.findall(r"`([\w/]+(?:/|\.py))`", PAGE)
    missing = [path for path in paths if not (SOURCE / path).exists() and not (ROOT / path).exists()]
    assert not missing


def test_every_name_of_the_walks_is_defined_in_its_file() -> None:
    pairs = re.findall(r"`(\w+)`\s+\(`([\w/]+\.py)`\)", PAGE)
    assert len(pairs) > 30
    wrong = [
        (name, path)
        for name, path in pairs
        if not re.search(rf"^ *(?:def|class) {name}\b", (SOURCE / path).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert not wrong


def test_layers_are_those_of_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    shown = re.search(r"<!-- layers -->\n(.*?)<!-- end of layers -->", PAGE, re.DOTALL)
    assert shown is not None
    assert [line.strip() for line in shown[1].splitlines()] == [layer.replace("convmesh.", "") for layer in layers]
