"""Amounts as people write them: `"25 GB/s"`, `"9 us"`, `80e9`; stored in one base unit each."""

from __future__ import annotations

import re

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BYTES = {f"{p}B": f for p, f in _DECIMAL.items()} | {
    f"{p}iB": 1024.0**n for n, p in enumerate(("K", "M", "G", "T"), start=1)
}

UNITS: dict[str, dict[str, float]] = {
    "B": _BYTES,
    "B/s": {f"{name}/s": f for name, f in _BYTES.items()} | {f"{p}b/s": f / 8 for p, f in _DECIMAL.items()},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    "FLOP/s": {f"{p}FLOP/s": f for p, f in _DECIMAL.items()},
    "W": {"W": 1.0, "kW": 1e3, "MW": 1e6},
    "J/bit": {"J/bit": 1.0, "nJ/bit": 1e-9, "pJ/bit": 1e-12},
    "$/h": {"$/h": 1.0},
    "g/kWh": {"g/kWh": 1.0, "kg/kWh": 1e3},
    "": {"": 1.0, "%": 1e-2},
}
"""By base unit: the units in which an amount may be written, with their factors."""

EXAMPLES = {
    "B": '"16 GiB"', "B/s": '"25 GB/s"', "s": '"5 us"', "FLOP/s": '"15.7 TFLOP/s"', "W": '"300 W"',
    "J/bit": '"10 pJ/bit"', "$/h": '"7.20 $/h"', "g/kWh": '"481 g/kWh"', "": "0.9",
}  # fmt: skip
"""By base unit: an example for error messages, as written in a file."""

_SHOWN = {
    "B": ("B", "KiB", "MiB", "GiB", "TiB"),
    "B/s": ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"),
    "s": ("ns", "us", "ms", "s"),
    "FLOP/s": ("FLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"),
    "W": ("W", "kW"),
    "J/bit": ("pJ/bit", "nJ/bit"),
}

_WRITTEN = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf))\s*(.*?)\s*")


_MOST = 1e300
"""Below the largest float: integers in a file have no limit."""


def amount(written: object, unit: str, example: str = "") -> float:
    """The amount in the base unit; a ValueError says what is wrong with it."""
    like = example or EXAMPLES[unit]
    if isinstance(written, bool) or not isinstance(written, (int, float, str)):
        raise ValueError(f"must be an amount, like {like}")
    value = _read(written, unit, like) if isinstance(written, str) else written
    if not abs(value) < _MOST:
        raise ValueError(f"must be finite, like {like}")
    return float(value)


def _read(text: str, unit: str, like: str) -> float:
    match = _WRITTEN.fullmatch(text)
    if match is None:
        raise ValueError(f"must be an amount, like {like}")
    number, name = match.groups()
    factors = UNITS[unit]
    if name and name not in factors:
        raise ValueError(f"has the unit {name!r}, not one of {', '.join(filter(None, factors)) or 'none'}")
    return float(number) * factors.get(name, 1.0)


def shown(value: float, unit: str) -> str:
    """The amount in the most readable unit: `900 GB/s`."""
    fitting = [name for name in _SHOWN.get(unit, ()) if abs(value) >= UNITS[unit][name] * (1 - 1e-12)]
    name = fitting[-1] if fitting else _SHOWN.get(unit, (unit,))[0]
    return f"{value / UNITS[unit][name]:.4g} {name}".rstrip()


def written_amount(value: float, unit: str) -> str | float | int:
    """The amount for a file: with a unit if that reads back to exactly the same number, else the plain number."""
    name = shown(value, unit).rpartition(" ")[2] if unit else ""
    text = f"{value / UNITS[unit][name]:.9g} {name}"
    if unit and amount(text, unit) == value:
        return text
    return int(value) if value == int(value) else value
