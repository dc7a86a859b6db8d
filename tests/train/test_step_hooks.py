"""What runs after a step besides training: energy, TensorBoard, and the line that people see."""

import contextlib
import io
import pty
import sys
from pathlib import Path

import pytest
import torch

from convmesh.measure.energy_counters import EnergyMeter, processor_counters
from convmesh.testing import RankPool
from convmesh.train import hooks
from convmesh.train.hooks import EnergyReadings
from convmesh.train.late_loss import LateLoss
from convmesh.train.progress_line import ProgressLine
from convmesh.train.step_record import LATEST, Progress, StepRecord, StepTimes
from tests.train.runs import losses, ran

Pools = dict[int, RankPool]


def record(step: int, seconds: float = 0.5, waited: float = 0.0) -> StepRecord:
    return StepRecord(step, 1, LateLoss(torch.tensor(2.0)), seconds, waited, 8, 0.1)


def test_energy_of_counters_is_spread_over_the_steps_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "SECONDS_ENERGY", 0.0)
    package = tmp_path / "intel-rapl:0"
    package.mkdir()
    for name, text in (("name", "package-0"), ("max_energy_range_uj", "9000000"), ("energy_uj", "7000000")):
        (package / name).write_text(text)
    progress = Progress()
    readings = EnergyReadings(EnergyMeter(processor_counters(tmp_path)), progress)
    first, second = record(1), record(2)
    readings.after_step(first)
    (package / "energy_uj").write_text("500000")  # the counter began anew at 9 J
    readings.after_step(second)
    assert first.joules_step is None
    assert second.joules_step == pytest.approx(2.5)
    assert progress.joules == pytest.approx(2.5)
    assert second.to_plain()["joules_step"] == pytest.approx(2.5)


def test_tensorboard_has_losses_and_evaluations(pools: Pools, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pools[1].run(ran, {"steps": 5, "tensorboard": True}, str(tmp_path / "run"))
    written = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    written.Reload()
    assert [event.value for event in written.Scalars("loss")] == pytest.approx(losses(tmp_path / "run"), rel=1e-6)
    assert len(written.Scalars("eval/accuracy")) == 1


def test_the_line_names_data_as_the_bottleneck_and_shows_the_prediction() -> None:
    progress = Progress(times=StepTimes((9.0, 8.0), (0.5, 0.0), (0.5, 0.0), (0.5, 0.2)))
    text = ProgressLine(progress, 10, 0.25).text(record(4, waited=0.2))
    for part in ("500 ms/step (predicted 250 ms)", "16 samples/s", "data 40%, the bottleneck", "0:03 left", "loss 2"):
        assert part in text


def test_the_first_steps_foretell_nothing() -> None:
    text = ProgressLine(Progress(times=StepTimes((9.0, 8.0))), 10, None).text(record(1, 9.0, 8.0))
    assert "data 89%" in text
    assert "left" not in text
    assert "bottleneck" not in text


def test_a_long_run_keeps_the_times_of_its_latest_steps_alone() -> None:
    times = StepTimes(*[(9.0, 9.0)] * 4, *[(1.0, 0.25)] * LATEST)
    assert (times.steps, times.median, times.data_share) == (4 + LATEST, 1.0, 0.25)
    assert len(times._latest) == LATEST


def test_a_narrow_terminal_shows_the_whole_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, its = pty.openpty()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with open(ours, "rb", buffering=0) as screen:
        with open(its, "w", encoding="utf-8") as terminal, monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", terminal)
            line = ProgressLine(Progress(times=StepTimes(*[(0.5, 0.2)] * 4)), 10, 0.25)
            line.after_step(record(4, waited=0.2))
            line.close()
        shown = " ".join(all_of(screen).split())
    for part in ("4/10", "(predicted 250 ms)", "data 40%, the bottleneck", "0:03 left"):
        assert part in shown


def all_of(screen: io.FileIO) -> str:
    """What a terminal shows once nobody writes to it any more; a single read may end anywhere."""
    parts = []
    with contextlib.suppress(OSError):  # Linux reports a terminal whose writers are gone as EIO
        while part := screen.read(1 << 16):
            parts.append(part)
    return b"".join(parts).decode()
