"""Operator tables: saved, merged, and refused if a file is not one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from convmesh.errors import SystemFileError
from convmesh.system import System
from convmesh.system.operator_table import OperatorTable, Overheads, Timing, UpdateTiming, update_key

RELU = Timing("relu.default(float32(2, 4))", "float32", ((2, 4),), 0, 64, 2e-6, 0.1, 1e-6)
TABLE = OperatorTable(
    "some processor",
    (RELU, replace(RELU, active=2, seconds=3e-6)),
    {"momentum float32": UpdateTiming(1e-6, 1e-9)},
    Overheads(1e-5, 2e-5, 1e-4, kinds={"conv": (3e-5, 4e-5)}),
    {"date": "2026-11-15"},
)


@pytest.mark.parametrize("name", ["table.json", "table.json.gz"])
def test_a_table_comes_back_from_its_file(tmp_path: Path, name: str) -> None:
    TABLE.save(tmp_path / name)
    back = OperatorTable.load(tmp_path / name)
    assert back.timings == TABLE.timings
    assert back.updates == TABLE.updates
    assert back.overheads.forward("conv") == 3e-5
    assert back.overheads.backward("cat") == 2e-5, "a kind that was not measured"


def test_a_sending_node_uses_its_kind_and_cut_else_adds_the_sending_time() -> None:
    kinds = {"conv": (1e-5, 2e-5), "conv space": (4e-4, 5e-4)}
    overheads = Overheads(3e-5, 4e-5, kinds=kinds, seconds_sending=1e-4)
    assert (overheads.forward("conv"), overheads.backward("conv")) == (1e-5, 2e-5)
    assert (overheads.forward("conv", "space"), overheads.backward("conv", "space")) == (4e-4, 5e-4), "nothing is added"
    assert overheads.forward("conv", "channels") == pytest.approx(1e-5 + 1e-4)
    assert overheads.backward("cat", "space") == pytest.approx(4e-5 + 1e-4), "neither kind nor cut was measured"


def test_tables_from_before_overheads_had_kinds_still_load(tmp_path: Path) -> None:
    TABLE.save(tmp_path / "old.json")
    plain = json.loads((tmp_path / "old.json").read_text())
    plain["overheads"] = {"seconds_forward": 1e-5, "seconds_backward": 2e-5, "seconds_sending": 1e-4}
    (tmp_path / "old.json").write_text(json.dumps(plain))
    back = OperatorTable.load(tmp_path / "old.json")
    assert (back.overheads.forward("conv"), back.overheads.forward("conv", "space")) == (1e-5, 1e-5 + 1e-4)
    assert back.update("momentum", "float32", 4) == TABLE.updates["momentum float32"]


def test_optimisers_are_found_by_active_ranks_else_alone(tmp_path: Path) -> None:
    crowded = UpdateTiming(2e-6, 3e-9, active=4)
    replace(TABLE, updates={**TABLE.updates, update_key("momentum", "float32", 4): crowded}).save(tmp_path / "t.json")
    table = OperatorTable.load(tmp_path / "t.json")
    assert table.update("momentum", "float32", 4) == crowded
    assert table.update("momentum", "float32", 2) == table.update("momentum", "float32") == UpdateTiming(1e-6, 1e-9)
    assert table.update("adam", "float32", 4) is None


def test_timings_are_found_by_call_and_by_active_ranks() -> None:
    timing = TABLE.find(RELU.call, 2)
    assert timing is not None
    assert timing.seconds == 3e-6
    assert TABLE.find(RELU.call, 3) is None
    assert TABLE.levels == (1, 2)


def test_the_later_of_two_timings_stays() -> None:
    again = replace(RELU, seconds=5e-6)
    merged = TABLE.merged(replace(TABLE, timings=(again,), updates={}))
    assert merged.find(RELU.call) == again
    assert merged.find(RELU.call, 2) is not None
    assert "momentum float32" in merged.updates


def test_tables_of_two_devices_are_not_merged() -> None:
    with pytest.raises(SystemFileError, match="two devices"):
        TABLE.merged(replace(TABLE, device="another"))


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"version": 99}', b"\x1f\x8b broken"])
def test_other_files_are_refused_with_a_reason(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(SystemFileError, match=r"bad\.json: not an operator table"):
        OperatorTable.load(tmp_path / "bad.json")


def test_the_h200_ships_with_measured_operators() -> None:
    table = System.load("dgx-h200").operators
    assert table is not None
    assert len(table.timings) > 2000
    assert {timing.dtype for timing in table.timings} >= {"bfloat16", "float32"}
    assert "momentum bfloat16" in table.updates
