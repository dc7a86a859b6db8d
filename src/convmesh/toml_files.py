"""Reading TOML that people wrote: anything wrong with a file is reported in one line."""

from __future__ import annotations

import codecs
import tomllib
from collections.abc import Iterator
from typing import Any

_LARGEST = 2**63
"""TOML's whole numbers have 64 bits; Python's are unbounded, and with thousands of digits cannot even be printed."""


class NotTomlError(ValueError):
    """Bytes that are not TOML; the message says why, in one line."""


def parse_toml(data: bytes) -> dict[str, Any]:
    """The tables of a file's bytes."""
    try:
        tables = tomllib.loads(data.removeprefix(codecs.BOM_UTF8).decode("utf-8").replace("\r\n", "\n"))
    except UnicodeDecodeError as error:
        raise NotTomlError(f"not TOML: byte {error.object[error.start]:#04x} at {error.start} is not UTF-8") from None
    except RecursionError:
        raise NotTomlError("not TOML that can be read: it is nested too deeply") from None
    except ValueError as error:  # invalid TOML, or a number that Python cannot read
        raise NotTomlError(f"not TOML: {error}") from None
    for key, value in _numbers(tables, ""):
        if not -_LARGEST <= value < _LARGEST:
            raise NotTomlError(f"not TOML: `{key}` is a whole number of more than 64 bits")
    return tables


def _numbers(value: Any, key: str) -> Iterator[tuple[str, int]]:
    """All whole numbers, each with its key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, key)
    elif isinstance(value, int):
        yield key, value
