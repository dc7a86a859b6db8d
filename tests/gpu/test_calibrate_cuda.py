"""Calibration of a machine with a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from convmesh.system import System

pytestmark = [
    pytest.mark.gpu,
    # Asking torch would start CUDA here, and forked ranks could not start it again.
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
]


def test_a_gpu_becomes_a_system(tmp_path: Path) -> None:
    output = tmp_path / "here.toml"
    verb = [sys.executable, "-m", "convmesh", "calibrate", "--quick", "--models", "lenet5", "--ranks", "1"]
    # In a process of its own: calibrating starts CUDA.
    subprocess.run([*verb, "--output", str(output)], check=True, capture_output=True)
    system = System.load(output)
    assert system.name == "here"
    assert "NVIDIA" in system.device.kind
    assert float(system.device.peak("bfloat16")) > float(system.device.peak("float32", tensor=False))
    assert 0.1 < float(system.device.fraction_vector) < 1, "float32 convolutions, without tensor cores"
    assert system.node.cores is None
    assert system.operators is not None
    assert all(timing.seconds_host > 0 for timing in system.operators.timings)
