"""Systems written and read back, and systems in the user's folder."""

from dataclasses import replace
from pathlib import Path

import pytest

import convmesh as cm
from convmesh.system.curves import TransferCurve
from convmesh.system.operator_table import OperatorTable, Overheads, Timing, UpdateTiming
from convmesh.system.transfer_table import TransferTable
from convmesh.system.units import amount, written_amount

OPERATORS = OperatorTable(
    "V100-SXM2-16GB",
    (Timing("relu.default(x)", "float32", ((4, 4),), 16, 128, 1e-5, 0.1),),
    {"momentum float32": UpdateTiming(1e-6, 1e-10)},
    Overheads(1e-5, 2e-5, 1e-4, kinds={"conv": (1e-5, 2e-5)}),
)
TRANSFERS = TransferTable(
    backend="nccl",
    cores=4,
    curves=(TransferCurve(carrier="all_reduce", ranks=2, active=2, bytes_sent=(64, 4096), seconds=(1e-5, 2e-5)),),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of systems."""
    monkeypatch.setenv("CONVMESH_SYSTEMS", str(tmp_path / "systems"))
    return tmp_path / "systems"


@pytest.mark.parametrize("name", cm.System.names())
def test_a_saved_system_loads_back_equal(name: str, tmp_path: Path) -> None:
    system = cm.System.load(name)
    path = system.save(tmp_path / "deep" / f"{name}.toml")
    assert cm.System.load(path) == system
    assert dict(cm.System.load(path).figures()) == dict(system.figures())


def test_inherited_figures_stay_marked(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('inherits = "abci"\npower.watts_host = "123.456789 W"\n')
    system = cm.System.load(path)
    assert cm.System.load(system.save(tmp_path / "again" / "ours.toml")) == system


def test_tables_are_saved_next_to_the_file(tmp_path: Path) -> None:
    system = replace(cm.System.load("abci"), operators=OPERATORS, transfers=TRANSFERS)
    path = system.save(tmp_path / "abci.toml")
    assert cm.System.load(path) == system
    path.rename(tmp_path / "moved.toml")
    (tmp_path / "abci.operators.json").unlink()
    with pytest.raises(cm.SystemFileError, match=r"`tables.operators` .* cannot be read: No such file"):
        cm.System.load(tmp_path / "moved.toml")


def test_a_table_is_inherited_only_with_the_parts_it_was_measured_on(tmp_path: Path) -> None:
    replace(cm.System.load("abci"), operators=OPERATORS, transfers=TRANSFERS).save(tmp_path / "base.toml")

    def loaded(text: str) -> cm.System:
        (tmp_path / "heir.toml").write_text(f'inherits = "base.toml"\n{text}\n')
        return cm.System.load(tmp_path / "heir.toml")

    assert (loaded("").operators, loaded("").transfers) == (OPERATORS, TRANSFERS)
    other_device = loaded('device.kind = "other"')
    assert (other_device.operators, other_device.transfers) == (None, TRANSFERS)
    other_links = loaded('links.nvlink.seconds_latency = "1 us"')
    assert (other_links.operators, other_links.transfers) == (OPERATORS, None)


def test_unknown_tables_and_odd_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.toml").write_text('inherits = "abci"\ntables.operator = "x.json"\n')
    with pytest.raises(cm.SystemFileError, match=r"`tables.operator` is unknown. Did you mean operators"):
        cm.System.load(tmp_path / "odd.toml")
    (tmp_path / "odd.toml").write_text('inherits = "abci"\ntables.operators = 3\n')
    with pytest.raises(cm.SystemFileError, match="must be a table of paths"):
        cm.System.load(tmp_path / "odd.toml")
    with pytest.raises(cm.SystemFileError, match=r"must end in \.toml, such as 'abci\.toml'"):
        cm.System.load("abci").save(tmp_path / "abci.json")


def test_local_is_found_once_it_exists(folder: Path) -> None:
    with pytest.raises(cm.UnknownNameError, match="measure this machine with `convmesh calibrate`"):
        cm.System.load("local")
    assert "local" not in cm.System.names()
    saved = replace(cm.System.load("fugaku"), name="local")
    saved.save(folder / "local.toml")
    assert cm.System.load("local") == saved
    assert "local" in cm.System.names()
    with pytest.raises(cm.UnknownNameError, match="Did you mean local"):
        cm.System.load("locla")


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from convmesh.system.folder import user_folder

    monkeypatch.delenv("CONVMESH_SYSTEMS")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert user_folder() == tmp_path / "convmesh" / "systems"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_folder() == tmp_path / ".local" / "share" / "convmesh" / "systems"


def test_ranks_take_turns_on_few_cores() -> None:
    node = cm.System.load("dgx-a100").node
    assert node.turns(64) == 1
    host = replace(node, devices=replace(node.devices, value=16), cores=replace(node.devices, value=2))
    assert [host.turns(ranks) for ranks in (1, 2, 3, 8, 100)] == [1, 1, 1.5, 4, 8]


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (25e9, "B/s", "25 GB/s"),
        (amount("5 us", "s"), "s", "5 us"),
        (5e-6, "s", 5e-6),
        (1 / 3, "s", 1 / 3),
        (8.0, "", 8),
        (16 * 2**30, "B", "16 GiB"),
    ],
)
def test_amounts_are_written_as_people_read_them(value: float, unit: str, written: object) -> None:
    assert written_amount(value, unit) == written
