"""Amounts: parsed with their units, shown in readable ones."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convmesh.system.units import EXAMPLES, UNITS, amount, shown


@pytest.mark.parametrize(
    ("written", "unit", "value"),
    [
        ("16 GiB", "B", 16 * 2**30),
        ("80GB", "B", 80e9),
        (80e9, "B", 80e9),
        ("200 Gb/s", "B/s", 25e9),
        ("12.5 GB/s", "B/s", 12.5e9),
        ("9 us", "s", 9e-6),
        ("9 µs", "s", 9e-6),
        ("1e-6", "s", 1e-6),
        ("989 TFLOP/s", "FLOP/s", 989e12),
        ("10 pJ/bit", "J/bit", 1e-11),
        ("90 %", "", 0.9),
        (3, "", 3.0),
    ],
)
def test_amounts_are_read(written: object, unit: str, value: float) -> None:
    assert amount(written, unit) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "written", ["", "fast", "5 parsec", "GB/s", "1 2 s", True, None, [1], "nan", "inf s", math.inf]
)
def test_other_things_are_refused(written: object) -> None:
    with pytest.raises(ValueError, match=r"must be|has the unit"):
        amount(written, "s")


@pytest.mark.parametrize("unit", list(UNITS))
def test_examples_are_amounts(unit: str) -> None:
    assert amount(EXAMPLES[unit].strip('"'), unit) > 0


@settings(max_examples=100)
@given(st.sampled_from(list(UNITS)), st.floats(1e-12, 1e18))
def test_shown_amounts_read_back(unit: str, value: float) -> None:
    assert amount(shown(value, unit), unit) == pytest.approx(value, rel=1e-3)
