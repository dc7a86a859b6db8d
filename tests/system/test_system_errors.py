"""Mistakes in system files: all of them in one message, each with file, key, value, rule and fix."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import convmesh as cm

EVERY_MISTAKE = """
inherits = "dgx-a100"
orign = "measured"
includes = ["a100-sxm"]
[device]
bytes_memory = "80 us"
bytes_memori = 3
processors = 10.5
fraction_memory = { value = 1.5, origin = "hearsay" }
fraction_vector = { value = 0.5, from = "nowhere" }
fraction_tensor = { valu = 0.5, origin = "measured", source = "here" }
seconds_launch = -1
[node]
devices = { value = 8, origin = "measured" }
dollars_per_hour = { value = 3, origin = "guess", source = "so", spread = [4, 5] }
[links]
nvswitch = 300
[links.network]
bytes_per_second = nan
shared_by = true
medium = "infiniband"
[links.rack]
devices = 16
[collectives.methods]
nvls-simple = false
[power]
watts_host = "much"
joules_per_bit.nvlin = 3
"""

EVERY_MESSAGE = """`system` (='bad.toml') has 25 problems:
- bad.toml: `includes.a100-sxm` is unknown. Did you mean a100-sxm4 or v100-sxm2 or p100-sxm2?
- bad.toml: `device.fraction_memory.origin` (='hearsay') must be one of measured, datasheet, publication, guess.
- bad.toml: `device.fraction_vector.from` (='nowhere') must be a key of [sources], which has none.
- bad.toml: `device.fraction_tensor.valu` is unknown. Did you mean value?
- bad.toml: `device.fraction_tensor.value` is missing: a figure needs a value.
- bad.toml: `node.devices.source` (='') must say where a figure of origin measured comes from.
- bad.toml: `collectives.methods.nvls-simple` (=False) removes an inherited key, but none of that name is inherited.
- bad.toml: `orign` is unknown. Did you mean origin?
- bad.toml: `device.bytes_memori` is unknown. Did you mean bytes_memory or bytes_per_second_memory or fraction_memory?
- bad.toml: `device.processors` (=10.5) must be a whole number, like 1.
- bad.toml: `device.bytes_memory` (='80 us') has the unit 'us', not one of B, kB, MB, GB, TB, PB, KiB, MiB, GiB, TiB.
- bad.toml: `device.fraction_memory` (=1.5) must be positive and at most 1, like 0.9.
- bad.toml: `device.seconds_launch` (=-1) must be positive, like "5 us".
- bad.toml: `node.dollars_per_hour.spread` (=[4, 5]) must enclose the value (=3).
- bad.toml: `links.nvswitch` (=300) must be a table.
- bad.toml: `links.network.medium` (='infiniband') must be one of nvlink, pcie, network.
- bad.toml: `links.network.bytes_per_second` (=nan) must be finite, like "25 GB/s".
- bad.toml: `links.network.shared_by` (=True) must be an amount, like 1.
- bad.toml: `links.rack.medium` is missing: write one of nvlink, pcie, network, or inherit it.
- bad.toml: `links.rack.bytes_per_second` is missing: write a number like "25 GB/s", or inherit it.
- bad.toml: `links.rack.shared_by` is missing: write a number like 1, or inherit it.
- bad.toml: `links.rack.oversubscription` is missing: write a number like 1, or inherit it.
- bad.toml: `links.rack.seconds_latency` is missing: write a number like "5 us", or inherit it.
- bad.toml: `power.watts_host` (='much') must be an amount, like "300 W".
- bad.toml: `power.joules_per_bit.nvlin` is unknown. Did you mean nvlink?
"""


def refused(folder: Path, text: str, name: str = "bad") -> str:
    (folder / f"{name}.toml").write_text(text)
    with pytest.raises(cm.SystemFileError) as error:
        cm.System.load(folder / f"{name}.toml")
    return str(error.value).replace(f"{folder}/", "")


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    assert refused(tmp_path, EVERY_MISTAKE) == EVERY_MESSAGE.strip()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            'inherits = "dgx-a100"\nnode.devices = 4\n',
            "`node.devices` (=4) must be the devices of some level of links (1, 8): set that level's `devices` too.",
        ),
        (
            'inherits = "abci"\nlinks.rack.devices = 34\n',
            "`links.rack.devices` (=34) must be a larger multiple of 4, which `links.nvlink` has.",
        ),
        (
            'inherits = "abci"\nlinks.rack.devices = false\n',
            "`links.rack.devices` is missing: only the outermost level may join any number of devices.",
        ),
        (
            'inherits = "abci"\ndevice.fraction_tensor = false\n',
            "`device.fraction_tensor` goes with `device.tensor_flops_per_second`: give both or neither.",
        ),
        (
            'inherits = "abci"\npower.watts_device_busy = "20 W"\n',
            "`power.watts_device_busy` (='20 W') must be at least `power.watts_device_idle` (=45 W).",
        ),
        (
            'inherits = "fugaku"\n[collectives.methods]\nring-simple = false\ntree-simple.seconds_step.network = false',
            "`collectives.methods` must have a method with a `seconds_step` for each of network.",
        ),
        (
            'inherits = "abci"\norigin = "measured"\n',
            "`source` (='') must say where a figure of origin measured comes from.",
        ),
        (
            'inherits = "abci"\n[power]\norigin = "guess"\nwatts_host = 600\nwatts_network = 30\n',
            "`power.origin` is unknown. There are: facility_overhead, grams_co2_per_kwh, joules_per_bit, "
            "watts_device_busy, watts_device_idle, watts_host, watts_network.",
        ),
        (
            'inherits = "abci"\nsources = 3\n',
            "`sources` (=3) must be a table of tables with origin, text and date.",
        ),
        (
            'inherits = "abci"\npower.watts_host = { value = 1, origin = "guess", source = "so", spread = 1 }\n',
            "`power.watts_host.spread` (=1) must be two amounts, the lowest first.",
        ),
        (
            'inherits = "abci"\npower.watts_host.high = 3\n',
            "`power.watts_host` must be a figure, not a table of figures.",
        ),
    ],
)
def test_figures_must_agree_with_each_other(tmp_path: Path, text: str, line: str) -> None:
    assert refused(tmp_path, text) == f"`system` (='bad.toml') has a problem:\n- bad.toml: {line}"


def test_an_empty_file_lacks_every_table(tmp_path: Path) -> None:
    lines = refused(tmp_path, "").splitlines()
    tables = ("device", "node", "links", "collectives.methods", "collectives", "power")
    rule = "is missing: add it, or inherit from a system that has it."
    assert lines == ["`system` (='bad.toml') has 6 problems:", *(f"- bad.toml: `{name}` {rule}" for name in tables)]


def test_mistakes_name_the_file_they_are_in(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('inherits = "abci"\npower.watts_host = 0\n')
    assert refused(tmp_path, 'inherits = "base.toml"\n', "child") == (
        "`system` (='child.toml') has a problem:\n"
        '- base.toml: `power.watts_host` (=0) must be positive, like "300 W".'
    )


def test_cycles_are_shown(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('inherits = "b.toml"\n')
    (tmp_path / "b.toml").write_text('inherits = "bad.toml"\n')
    message = refused(tmp_path, 'inherits = "a.toml"\n')
    assert message.startswith(
        "b.toml: `inherits` (='bad.toml') leads back to itself: bad -> a -> b -> bad. Inherit from"
    )


def test_unknown_systems_offer_the_nearest() -> None:
    with pytest.raises(cm.UnknownNameError) as error:
        cm.System.load("dgxa100")
    assert str(error.value) == "`system` (='dgxa100') is unknown. Did you mean dgx-a100 or dgx-h100 or dgx1-v100?"


def test_unknown_parents_offer_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('inherits = "abcy"\n')
    with pytest.raises(cm.UnknownNameError, match="Did you mean abci"):
        cm.System.load(tmp_path / "x.toml")


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(cm.SystemFileError, match=r"none\.toml'\): No such file or directory\."):
        cm.System.load(tmp_path / "none.toml")
    assert refused(tmp_path, "a = = 1").startswith("bad.toml: not TOML: Invalid value (at line 1, column 5).")
    assert refused(tmp_path, "inherits = 3") == "bad.toml: `inherits` (=3) must be the name or path of one system."


KEYS = [key for key, _ in cm.System.load("abci").figures()]
VALUES = st.sampled_from(
    ["false", "true", "[]", "{}", "nan", "-inf", "0", "-1", "1", "1e400", "9" * 400, "2026-11-15", '""', '"1__0 s"']
) | st.text(max_size=6).map(json.dumps)


@settings(max_examples=50)
@given(
    key=st.sampled_from(
        [*KEYS, *{key.split(".")[0] for key in KEYS}, *{key.rsplit(".", 1)[0] for key in KEYS}, "sources"]
    ),
    below=st.sampled_from(["", ".value", ".from", ".origin", ".source", ".spread", ".date", ".other"]),
    value=VALUES,
)
def test_odd_values_load_or_raise_our_error(tmp_path: Path, key: str, below: str, value: str) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(f'inherits = "abci"\n{key}{below} = {value}\n')
    try:
        said = cm.System.load(path).render()
    except cm.SystemFileError as error:
        said = str(error)
    assert "odd" in said
