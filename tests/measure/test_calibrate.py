"""`convmesh calibrate` on the machine that the tests run on."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed

import convmesh as cm
from convmesh.cli import main
from convmesh.cli.exits import Exit
from convmesh.measure.calibrate import Budget, _in_a_job_of_one, calibrate
from convmesh.measure.energy_counters import EnergyMeter
from convmesh.measure.local_system import local_system
from convmesh.measure.machine import this_machine
from convmesh.measure.power import with_power
from convmesh.system.operator_table import OperatorTable

ARGS = ["calibrate", "--quick", "--models", "lenet5", "--ranks", "1,2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("systems")


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVMESH_SYSTEMS", str(folder))
    enough = replace(Budget.short(), seconds=600.0)  # a busy machine needs longer for the same operators
    monkeypatch.setattr(Budget, "short", lambda: enough)


def test_this_machine_becomes_local(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ARGS) == Exit.DONE
    shown = capsys.readouterr()
    assert "memory bandwidth" in shown.err
    assert "Use it with `--system local`" in shown.out
    system, machine = cm.System.load("local"), this_machine()
    assert system.device.kind == machine.kind
    assert system.node.cores is not None
    assert int(system.node.cores) == machine.cores
    assert system.device.flops_per_second["float32"].origin == "measured"
    assert 1e8 < float(system.device.peak("float32")) < 1e14
    assert system.links[0].seconds_latency.origin == "measured"
    assert system.power.watts_device_busy.origin == "guess"
    assert system.operators is not None
    assert len(system.operators.timings) > 100
    assert ("momentum float32 x2" in system.operators.updates) == (machine.cores > 1)
    assert system.transfers is not None
    assert (folder / "local.toml").read_text().startswith("summary = ")


def test_a_second_run_extends_the_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = cm.System.load("local").operators
    assert main([*ARGS, "--json"]) == Exit.DONE
    shown = capsys.readouterr()
    after = cm.System.load("local").operators
    assert before is not None
    assert after is not None
    assert set(before.timings) <= set(after.timings)
    assert "transfers between" not in shown.err
    printed = json.loads(shown.out)
    assert printed["operators"] == len(after.timings)
    assert printed["figures"]["device.seconds_launch"]["origin"] == "measured"


def test_predictions_use_what_was_timed(capsys: pytest.CaptureFixture[str]) -> None:
    net = cm.models.find("lenet5")
    plan = cm.plan(net.create(), (4, *net.sample), cm.Mesh(data=2), "data")
    prediction = cm.predict(plan, "local")
    assert 0 < prediction.seconds_step < 10
    assert main(["explain", "data", "--system", "local", "--ranks", "2"]) == Exit.DONE
    assert "on local:" in capsys.readouterr().out


def test_nothing_that_was_timed_is_lost_when_interrupted(folder: Path, tmp_path: Path) -> None:
    """Stop in the middle of the operators, as Ctrl-C does; the file loads with the timings so far."""
    messages: list[str] = []

    def stop(message: str) -> None:
        messages.append(message)
        if "turn 3 of 4" in message:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(["lenet5"], (1,), output=tmp_path / "mine.toml", budget=Budget.short(), progress=stop)
    table = cm.System.load(tmp_path / "mine.toml").operators
    assert isinstance(table, OperatorTable)
    per_turn = int(messages[-2].split(" of ")[1].split(",")[0])
    assert len(table.timings) == pytest.approx(2 * per_turn, abs=3), "those that cannot be timed alone are left out"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ranks", "1,two"], "`--ranks` (='1,two') must be comma-separated positive numbers"),
        (["--ranks", "0"], "`--ranks` (='0')"),
        (["--models", ","], "`--models` (=',') must name a network"),
        (["--models", "lenet"], "Did you mean lenet5"),
        (["--models", "lenet5", "--input", "1x"], "`--input` (='1x') must be one sample's shape"),
        (["--batch", "0"], "`--batch` (=0)"),
        (["--output", "here.json"], "must end in .toml"),
        (["--models", "lenet5", "--output", "/proc/none/local.toml"], "`output` (='/proc/none/local.toml')"),
    ],
)
def test_bad_input_is_one_message(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--quick", *args]) == Exit.BAD_INPUT
    assert message in capsys.readouterr().err


class Steady:
    """The counter of a machine that draws a constant 30 W, and its clock: tests rarely may read a real one."""

    name = "package-0"

    def clock(self) -> float:
        self._now = time.perf_counter()
        return self._now

    def joules(self) -> float:
        return 30.0 * self._now

    def between(self, begin: float, end: float) -> float:
        return end - begin


def test_power_is_measured_if_there_are_counters() -> None:
    guessed, machine = cm.System.load("fugaku").power, this_machine()
    assert with_power(guessed, machine, EnergyMeter()) == guessed
    counter = Steady()
    measured = with_power(guessed, machine, EnergyMeter([counter], counter.clock), seconds=0.2)
    assert measured.watts_device_idle.value == pytest.approx(30.0 / machine.cores)
    assert measured.watts_device_busy.value == pytest.approx(30.0 / machine.cores)
    assert (measured.watts_device_busy.origin, measured.watts_host) == ("measured", guessed.watts_host)


@pytest.mark.parametrize(
    ("kind", "gpus", "like", "levels"),
    [("NVIDIA H200", 1, "dgx-h200", 1), ("Tesla V100-SXM2-16GB", 4, "abci", 2), ("Some GPU", 8, "dgx-a100", 2)],
)
def test_a_gpu_host_is_like_the_most_similar_system(
    kind: str, gpus: int, like: str, levels: int, tmp_path: Path
) -> None:
    machine = replace(this_machine(), kind=kind, gpus=gpus)
    system = local_system(machine, cm.System.load(like).device)
    assert cm.System.load(system.save(tmp_path / "local.toml")) == system
    assert (int(system.node.devices), len(system.links), system.node.cores) == (gpus, levels, None)
    assert {figure.inherited for key, figure in system.figures() if key.startswith("power.")} == {like}
    assert system.most_devices is None


def test_a_job_of_one_needs_no_fork() -> None:
    """A process that uses a GPU cannot fork."""
    assert _in_a_job_of_one(1, torch.distributed.get_world_size) == [1]
    assert not torch.distributed.is_initialized()
