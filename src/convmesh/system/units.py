"""Amounts as people write them: `"25 GB/s"`, `"9 us"`, `80e9`; kept in one base unit each."""

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
"""By base unit: the units that an amount may be written in, and what each is worth."""

EXAMPLES = {
    "B": '"16 GiB"', "B/s": '"25 GB/s"', "s": '"5 us"', "FLOP/s": '"15.7 TFLOP/s"', "W": '"300 W"',
    "J/bit": '"10 pJ/bit"', "$/h": '"7.20 $/h"', "g/kWh": '"481 g/kWh"', "": "0.9",
}  # fmt: skip
"""By base unit: an amount as a file has it, for error messages."""

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
"""Below what floats end at: whole numbers of a file have no end."""


def amount(written: object, unit: str, example: str = "") -> float:
    """What was written, in the base unit; ValueError says what is wrong with it."""
    like = example or EXAMPLES[unit]
    if isinstance(written, bool) or not isinstance(written, (int, float, str)):
        raise ValueError(f"must be an amount, like {like}")
    value = _read(written, unit, like) if isinstance(written, str) else written
    if not abs(value) < _MOST:
        raise ValueError(f"must be finite, like {like}")
    return float(value)


def _read(text: str, unit: str, like: str) -> float:
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise ValueError(f"must be an amount, like {like}")
    number, name = found.groups()
    known = UNITS[unit]
    if name and name not in known:
        raise ValueError(f"has the unit {name!r}, not one of {', '.join(filter(None, known)) or 'none'}")
    return float(number) * known.get(name, 1.0)


def shown(value: float, unit: str) -> str:
    """The amount in the unit that a person would choose: `900 GB/s`."""
    fitting = [name for name in _SHOWN.get(unit, ()) if abs(value) >= UNITS[unit][name] * (1 - 1e-12)]
    name = fitting[-1] if fitting else _SHOWN.get(unit, (unit,))[0]
    return f"{value / UNITS[unit][name]:.4g} {name}".rstrip()


def written_amount(value: float, unit: str) -> str | float | int:
    """The amount as a file has it: with a unit if that reads back to the very number, else the plain number."""
    name = shown(value, unit).rpartition(" ")[2] if unit else ""
    text = f"{value / UNITS[unit][name]:.9g} {name}"
    if unit and amount(text, unit) == value:
        return text
    return int(value) if value == int(value) else value
