"""Energy counters: read if present, skipped if absent."""

from pathlib import Path

import pytest

from convmesh.measure.energy_counters import EnergyMeter, RaplCounter, energy_meter, gpu_counters, processor_counters


def package(folder: Path, name: str, microjoules: int, limit: int = 10_000_000) -> Path:
    """Write a counter in powercap's format."""
    folder.mkdir(parents=True)
    for file, value in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", limit)):
        (folder / file).write_text(f"{value}\n")
    return folder


def test_without_counters_blocks_run_and_the_energy_is_none() -> None:
    with EnergyMeter().window() as used:
        done = sum(range(10))
    assert done == 45
    assert (used.joules, used.joules_total) == ({}, None)
    assert used.seconds > 0


def test_a_machine_without_gpus_has_no_gpu_counters() -> None:
    if not Path("/dev/nvidiactl").exists():
        assert gpu_counters() == []
    with energy_meter().window() as used:
        pass
    assert all(joules >= 0 for joules in used.joules.values())


def test_cpus_are_read_by_package_and_not_by_part(tmp_path: Path) -> None:
    package(tmp_path / "intel-rapl:0", "package-0", 1_000_000)
    package(tmp_path / "intel-rapl:0:0", "core", 500_000)
    counters = processor_counters(tmp_path)
    assert [counter.name for counter in counters] == ["package-0"]
    meter = EnergyMeter(counters)
    with meter.window() as used:
        (tmp_path / "intel-rapl:0" / "energy_uj").write_text("3500000")
    assert used.joules == {"package-0": pytest.approx(2.5)}


def test_a_counter_wraps_around_at_its_limit(tmp_path: Path) -> None:
    counter = RaplCounter(package(tmp_path / "intel-rapl:0", "package-0", 9_000_000))
    assert counter.between(9.0, 0.5) == pytest.approx(1.5)


def test_an_unreadable_counter_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "intel-rapl:0").mkdir()
    assert processor_counters(tmp_path) == []
