"""Calibration of a machine with a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from convmesh.measure.calibrate import Budget, calibrate

pytestmark = [
    pytest.mark.gpu,
    # Asking torch would start CUDA here, and forked ranks could not start it again.
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
]


def test_a_gpu_becomes_a_system(tmp_path: Path) -> None:
    system = calibrate(["lenet5"], (1,), output=tmp_path / "here.toml", budget=Budget.short())
    assert system.name == "here"
    assert system.device.kind == torch.cuda.get_device_name(0)
    assert float(system.device.peak("bfloat16")) > float(system.device.peak("float32", tensor=False))
    assert system.node.cores is None
    assert system.operators is not None
    assert all(timing.seconds_host > 0 for timing in system.operators.timings)
