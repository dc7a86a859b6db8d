"""Every shipped system is complete and plausible, and gives the origin of its numbers."""

import itertools
import pickle
import subprocess
import sys

import pytest

import convmesh as cm
from convmesh.system import ORIGINS, part_names

NAMES = [
    "abci", "dgx-a100", "dgx-h100", "dgx-h200", "dgx1-p100", "dgx1-v100", "dgx2", "fugaku", "juwels-booster",
    "l40s-pcie", "lassen", "p2-8xlarge", "perlmutter", "piz-daint", "sierra-p100",
]  # fmt: skip


def test_these_systems_ship() -> None:
    assert cm.System.names() == NAMES
    assert {"v100-sxm2", "nccl", "mpi"} <= set(part_names())


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_an_origin(name: str) -> None:
    system = cm.System.load(name)
    figures = dict(system.figures())
    assert len(figures) > 35
    for key, figure in figures.items():
        assert figure.origin in ORIGINS, key
        assert len(figure.source) > 5, key
        assert "without an origin" not in figure.source, key
        assert not figure.inherited, key
    assert system.name == name
    assert system.summary


@pytest.mark.parametrize("name", NAMES)
def test_bandwidth_falls_from_the_inside_out(name: str) -> None:
    system = cm.System.load(name)
    each = [float(system.device.bytes_per_second_memory), *(level.bytes_per_second_each for level in system.links)]
    assert each == sorted(each, reverse=True)
    for level in system.links:
        assert level.bytes_per_second_pair is None or float(level.bytes_per_second_pair) <= float(
            level.bytes_per_second
        )
        assert 1e-7 < float(level.seconds_latency) < 1e-4
    assert system.most_devices is None


@pytest.mark.parametrize("name", NAMES)
def test_rates_are_ordered_by_number_format(name: str) -> None:
    device = cm.System.load(name).device
    for table in (device.flops_per_second, device.tensor_flops_per_second):
        rates = [float(table[f]) for f in ("float64", "float32", "tf32", "float16") if f in table]
        assert rates == sorted(rates)
    for number_format, figure in device.tensor_flops_per_second.items():
        assert float(device.peak(number_format)) == float(figure)
        if number_format in device.flops_per_second:
            assert float(device.peak(number_format, tensor=False)) < float(figure)
    assert 2 < float(device.peak("float32")) / float(device.bytes_per_second_memory) < 150


@pytest.mark.parametrize("name", NAMES)
def test_power_and_price_are_plausible(name: str) -> None:
    system = cm.System.load(name)
    power, devices = system.power, int(system.node.devices)
    assert float(power.watts_device_idle) < 0.5 * float(power.watts_device_busy)
    assert 100 < devices * float(power.watts_device_busy) + float(power.watts_host) < 12_000
    if system.node.dollars_per_hour is not None:
        assert 0.3 < float(system.node.dollars_per_hour) / devices < 15


def test_generations_follow_each_other() -> None:
    line = [
        cm.System.load(name).device
        for name in ("p2-8xlarge", "dgx1-p100", "dgx1-v100", "dgx-a100", "dgx-h100", "dgx-h200")
    ]
    for older, newer in itertools.pairwise(line):
        assert float(older.bytes_per_second_memory) < float(newer.bytes_per_second_memory)
        assert float(older.peak("float32")) <= float(newer.peak("float32"))
    assert cm.System.load("dgx2").device.bytes_memory.value == 2 * cm.System.load("dgx1-v100").device.bytes_memory.value


def test_collectives_are_those_of_the_hardware() -> None:
    assert cm.System.load("dgx-h100").collectives.algorithms == ("ring", "tree", "hierarchical", "nvls")
    assert cm.System.load("dgx-a100").collectives.algorithms == ("ring", "tree")
    assert {method.protocol for method in cm.System.load("dgx1-p100").collectives.methods} == {"ll", "simple"}
    assert [m.name for m in cm.System.load("dgx-h200").collectives.over("network")][-1] == "hierarchical-simple"


def test_measured_figures_are_marked() -> None:
    measured = {key for key, figure in cm.System.load("dgx-h200").figures() if figure.origin == "measured"}
    assert measured == {"device.fraction_tensor", "device.fraction_memory"}


def test_table_shows_every_figure() -> None:
    system = cm.System.load("abci")
    lines = str(system).splitlines()
    assert lines[1].startswith(
        "4 × V100-SXM2-16GB per node; links from the inside out: nvlink (nvlink), rack (network)"
    )
    for key, figure in system.figures():
        (line,) = [line for line in lines if line.startswith(f"{key} ")]
        assert line.split(None, 1)[1].startswith(str(figure))
        assert line.endswith(figure.provenance)
    assert lines[-1] == "69 figures: 10 datasheet, 45 publication, 14 guess"


def test_systems_are_values() -> None:
    system = cm.System.load("fugaku")
    assert system == cm.System.load("fugaku") == pickle.loads(pickle.dumps(system))
    with pytest.raises(AttributeError):
        system.name = "other"  # type: ignore[misc]


def test_ranks_on_processors_run_on_a_cpu() -> None:
    kinds = {name: cm.System.load(name).torch_device for name in NAMES}
    assert [name for name, kind in kinds.items() if kind == "cpu"] == ["fugaku"]


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(cm.UnknownNameError, match=r"`number_format` \(='bfloat16'\) is unknown\. Did you mean float16"):
        cm.System.load("abci").device.peak("bfloat16")


def test_systems_load_without_torch() -> None:
    code = "import sys, convmesh; convmesh.System.load('abci').render(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
