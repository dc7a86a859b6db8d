"""`convmesh verify --device cuda`: ranks that share the GPU, in float32, against one process on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu,
    # Asking torch would start CUDA here, and forked ranks could not start it again.
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
]

CASES = [
    ("resnet18", "2", ["--strategy", "data+spatial"]),
    ("unet2d", "2", ["--strategy", "spatial", "--compile"]),
    ("lenet5", "1", ["--compile"]),  # one rank, a GPU of its own: NCCL, and CUDA graphs in the third step
    ("lenet5", "2", ["--strategy", "pipeline", "--compile"]),
    ("lenet5", "2", ["--strategy", "filter"]),
]


@pytest.mark.parametrize(("network", "ranks", "more"), CASES, ids=[f"{n}-{r}-{'-'.join(m)}" for n, r, m in CASES])
def test_plans_are_exact_on_a_gpu(network: str, ranks: str, more: list[str]) -> None:
    """In a process of its own, as a user runs it: `verify` asks torch for GPUs."""
    command = ["verify", network, "--small", "--ranks", ranks, "--device", "cuda", "--json", *more]
    done = subprocess.run(
        [sys.executable, "-m", "convmesh", *command], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    told = json.loads(done.stdout)
    assert told["ok"]
    assert 1e-10 < told["worst"]["error"] < 1e-2
    assert any("in float32, without TF32" in note for note in told["notes"])


def test_hidden_gpus_are_none() -> None:
    command = [sys.executable, "-m", "convmesh", "verify", "lenet5", "--small", "--ranks", "2", "--device", "cuda"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=hidden, timeout=120, check=False)
    assert done.returncode == 2
    assert "`device` (='cuda') needs a GPU" in done.stderr
