"""Transfer tables: between and beyond measured sizes, for unmeasured groups, and on disk."""

from pathlib import Path

import pytest

from convmesh.errors import SystemFileError
from convmesh.system.curves import TransferCurve, steps_of
from convmesh.system.transfer_table import Overlap, TransferTable

LATENCY, PER_BYTE = 50e-6, 1e-9


def curve(carrier: str, ranks: int, active: int, cores: int = 2) -> TransferCurve:
    """A host whose transfers cost latency per step and time per byte, and whose ranks take turns on its cores."""
    sizes = tuple(64 * 4**n for n in range(11))
    turns = max(1.0, active / cores)
    seconds = tuple(turns * (LATENCY * steps_of(carrier, ranks) + size * PER_BYTE) for size in sizes)
    return TransferCurve(carrier=carrier, ranks=ranks, active=active, bytes_sent=sizes, seconds=seconds)


@pytest.fixture
def table() -> TransferTable:
    shapes = [(2, 2), (2, 4), (4, 4), (2, 8), (4, 8), (8, 8)]
    curves = tuple(curve(carrier, *shape) for carrier in ("all_reduce", "neighbour") for shape in shapes)
    overlaps = tuple(
        Overlap(active=n, compute_slowdown=1 + n / 8, transfer_slowdown=1.5, hidden=1 / n) for n in (2, 4, 8)
    )
    return TransferTable(backend="gloo", cores=2, curves=curves, overlaps=overlaps, date="2026-11-15")


def test_measured_sizes_are_returned_unchanged(table: TransferTable) -> None:
    timed = table.seconds("all_reduce", ranks=2, active=4, bytes_sent=64 * 4**5)
    assert timed is not None
    assert timed.measured
    assert timed.seconds == pytest.approx(2 * (2 * LATENCY + 64 * 4**5 * PER_BYTE))


@pytest.mark.parametrize("bytes_sent", [1, 100, 3_000, 200_000, 5_000_000, 300_000_000])
def test_other_sizes_are_between_or_beyond(table: TransferTable, bytes_sent: int) -> None:
    timed = table.seconds("all_reduce", ranks=4, active=4, bytes_sent=bytes_sent)
    assert timed is not None
    assert not timed.measured
    assert timed.seconds == pytest.approx(2 * (6 * LATENCY + bytes_sent * PER_BYTE), rel=0.01)


@pytest.mark.parametrize(("ranks", "active"), [(3, 3), (3, 6), (6, 6), (2, 6), (16, 16), (5, 5)])
@pytest.mark.parametrize("bytes_sent", [64, 65_536, 20_000_000])
def test_unmeasured_groups_scale_with_their_steps(
    table: TransferTable, ranks: int, active: int, bytes_sent: int
) -> None:
    timed = table.seconds("all_reduce", ranks=ranks, active=active, bytes_sent=bytes_sent)
    assert timed is not None
    assert not timed.measured
    expected = max(1.0, active / 2) * (2 * (ranks - 1) * LATENCY + bytes_sent * PER_BYTE)
    assert timed.seconds == pytest.approx(expected, rel=0.15)


def test_time_rises_with_bytes_ranks_and_active_ranks(table: TransferTable) -> None:
    def seconds(ranks: int, active: int, bytes_sent: float) -> float:
        timed = table.seconds("all_reduce", ranks=ranks, active=active, bytes_sent=bytes_sent)
        assert timed is not None
        return timed.seconds

    by_bytes = [seconds(4, 8, 10 * 1.7**n) for n in range(40)]
    assert by_bytes == sorted(by_bytes)
    assert seconds(2, 8, 4096) < seconds(3, 8, 4096) < seconds(4, 8, 4096) < seconds(8, 8, 4096)
    assert seconds(2, 2, 4096) < seconds(2, 4, 4096) < seconds(2, 6, 4096) < seconds(2, 8, 4096)


def test_an_unmeasured_carrier_has_no_time(table: TransferTable) -> None:
    assert table.seconds("reduce", ranks=2, active=2, bytes_sent=64) is None
    assert TransferTable(backend="gloo", cores=2, curves=()).overlap(4) is None


def test_overlap_is_that_of_the_nearest_number_of_ranks(table: TransferTable) -> None:
    assert [overlap.active for n in (1, 2, 3, 6, 16) if (overlap := table.overlap(n))] == [2, 2, 4, 8, 8]


def test_a_table_survives_the_disk(table: TransferTable, tmp_path: Path) -> None:
    assert TransferTable.load(table.save(tmp_path / "local.transfers.json")) == table


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "must be a transfer table as JSON"),
        ('{"backend": "gloo"}', "curves"),
        (
            '{"backend": "gloo", "cores": 2, "curves": [{"carrier": "all_reduce", "ranks": 2, "active": 2,'
            ' "bytes_sent": [64, 32], "seconds": [1, 2]}]}',
            "ascending bytes_sent",
        ),
        (
            '{"backend": "gloo", "cores": 2, "curves": [{"carrier": "all_reduce", "ranks": 2, "active": 2,'
            ' "bytes_sent": [64], "seconds": [-1]}]}',
            "positive",
        ),
        ('{"backend": "gloo", "cores": 2, "curves": [], "colour": "red"}', "colour"),
    ],
)
def test_files_that_are_not_tables_are_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(SystemFileError, match=says):
        TransferTable.load(path)
