"""Real `mpirun`s start ranks of ConvMesh: Debian's Open MPI and MPICH, where they are installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch, convmesh as cm
torch.set_num_threads(1)
cm.init()
mesh = cm.open_mesh(cm.Mesh(height=2))
image, kernel = torch.arange(32.0).view(1, 1, 8, 4), torch.ones(1, 1, 3, 3)
split = torch.nn.functional.conv2d(cm.shard(image, mesh, {2: "height"}), kernel, padding=1).sum()
assert split == torch.nn.functional.conv2d(image, kernel, padding=1).sum()
print("rank", mesh.rank, "of", mesh.mesh.size, "agrees", flush=True)
"""
STARTERS = {
    "mpirun.openmpi": ("--allow-run-as-root", "--oversubscribe"),
    "mpiexec.mpich": (),
}


def started(starter: str, *command: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(starter) is None:
        pytest.skip(f"{starter} is not installed")
    call = [starter, *STARTERS[starter], "-n", "2", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(call, capture_output=True, text=True, timeout=600, check=False, env=environment)


@pytest.mark.parametrize("starter", STARTERS)
def test_its_processes_are_ranks(starter: str, tmp_path: Path) -> None:
    """Also behind a shell, which stands between them and what started them."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = started(starter, "sh", "-c", f"'{sys.executable}' '{script}'; exit $?")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["rank 0 of 2 agrees", "rank 1 of 2 agrees"]
