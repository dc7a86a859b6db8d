"""Tables of a run file as flags: `--plan.mesh data=2,height=2`, `--model.args "filters=8, norm=batch"`."""

from __future__ import annotations

import re
from typing import Annotated, Any

import tomli_w
from tyro.constructors import PrimitiveConstructorSpec

from convmesh.toml_files import NotTomlError, parse_toml

_BARE = re.compile(r"(=\s*)(?!(?:true|false|inf|nan)\s*(?:,|$))([A-Za-z_./~][^\s,=\"'{}\[\]]*)(?=\s*(?:,|$))")
"""A string without its quotes, which shells strip: a name or a path."""


def _parsed(texts: list[str]) -> dict[str, Any]:
    """The table that one flag holds, written as in TOML without the braces."""
    inner = _BARE.sub(r'\1"\2"', texts[0].strip().removeprefix("{").removesuffix("}"))
    try:
        table: dict[str, Any] = parse_toml(f"table = {{{inner}}}".encode())["table"]
    except NotTomlError:
        raise ValueError(
            f"{texts[0]!r} must be key=value, separated by commas; put texts with spaces in quotes"
        ) from None
    return table


def _shown(table: dict[str, Any]) -> list[str]:
    lines = tomli_w.dumps({key: value for key, value in table.items() if value is not None}).splitlines()
    return [", ".join(lines)]


_FLAG: PrimitiveConstructorSpec[dict[str, Any]] = PrimitiveConstructorSpec(
    nargs=1,
    metavar="KEY=VALUE,...",
    instance_from_str=_parsed,
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=_shown,
)

Table = Annotated[dict[str, Any], _FLAG]
"""Names and values for a model, a source or a user's function."""

Counts = Annotated[dict[str, int], _FLAG]
"""Names and whole numbers, such as a mesh."""
