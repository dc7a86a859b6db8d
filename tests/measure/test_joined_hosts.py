"""Hosts like this machine, joined by a link whose numbers are known."""

from dataclasses import replace
from pathlib import Path

import pytest

import convmesh as cm
from convmesh.errors import SystemFileError
from convmesh.measure.joined_hosts import joined_hosts
from convmesh.oracle.pricing.transfer_model import TransferModel
from convmesh.plans.steps import Transfer
from convmesh.system.curves import TransferCurve
from convmesh.system.transfer_table import TransferTable

SECONDS_SUM, SECONDS_MESSAGE = 0.0004, 0.0003
LATENCY, BYTES = 0.002, 1_000_000


def curve(carrier: str, floor: float) -> TransferCurve:
    return TransferCurve(carrier=carrier, ranks=2, active=2, bytes_sent=(64, 1024), seconds=(floor, floor))


TABLE = TransferTable(
    backend="gloo", cores=2, curves=(curve("all_reduce", SECONDS_SUM), curve("neighbour", SECONDS_MESSAGE))
)
LOCAL = replace(cm.System.load("fugaku"), transfers=TABLE)


def price(system: cm.System, carrier: str, ranks: int, bytes_sent: int) -> float:
    transfer = Transfer(
        carrier=carrier, axes=("data",), bytes_sent=bytes_sent, peer=1 if carrier == "neighbour" else None
    )
    return float(TransferModel(system, cm.Mesh(data=ranks)).transfer(transfer, 0).value)


def test_transfers_take_the_link_and_what_the_library_took_here() -> None:
    hosts = joined_hosts(LOCAL, bytes_per_second=1e8, seconds_latency=LATENCY, fraction_wire=0.8)
    crossing = BYTES / 0.8e8
    assert price(hosts, "neighbour", 2, BYTES) == pytest.approx(2 * LATENCY + SECONDS_MESSAGE + crossing)
    assert price(hosts, "all_reduce", 2, BYTES) == pytest.approx(4 * LATENCY + SECONDS_SUM + crossing)
    assert price(hosts, "all_reduce", 4, BYTES) == pytest.approx(12 * LATENCY + 3 * SECONDS_SUM + crossing)


def test_a_sum_of_two_values_is_not_cut_and_crosses_once_a_step() -> None:
    hosts = joined_hosts(LOCAL, bytes_per_second=1e8, seconds_latency=LATENCY)
    assert price(hosts, "all_reduce", 2, 8) == pytest.approx(2 * LATENCY + SECONDS_SUM, rel=1e-3)
    assert price(hosts, "all_reduce", 2, 16) == pytest.approx(4 * LATENCY + SECONDS_SUM, rel=1e-3)
    assert price(hosts, "all_reduce", 4, 12) == pytest.approx(6 * LATENCY + 3 * SECONDS_SUM, rel=1e-3)


def test_computing_goes_on_while_data_are_on_the_link() -> None:
    hosts = joined_hosts(LOCAL, bytes_per_second=1e8, seconds_latency=LATENCY)
    assert TransferModel(hosts, cm.Mesh(data=2)).overlap.hidden == 1


def test_hosts_are_a_system_that_can_be_saved(tmp_path: Path) -> None:
    hosts = joined_hosts(LOCAL, bytes_per_second=1e8, seconds_latency=LATENCY)
    loaded = cm.System.load(hosts.save(tmp_path / "hosts.toml"))
    assert loaded.links == hosts.links
    assert loaded.collectives == hosts.collectives
    assert int(loaded.node.devices) == 1


def test_a_machine_without_timed_transfers_is_refused() -> None:
    with pytest.raises(SystemFileError, match="calibrate it for two ranks"):
        joined_hosts(replace(LOCAL, transfers=None), bytes_per_second=1e8, seconds_latency=LATENCY)
    table = replace(TABLE, curves=TABLE.curves[:1])
    with pytest.raises(SystemFileError, match="neighbour"):
        joined_hosts(replace(LOCAL, transfers=table), bytes_per_second=1e8, seconds_latency=LATENCY)
