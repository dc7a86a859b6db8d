"""The entry point for Ray Train on a real local Ray, where it is installed (`pip install 'ray[train]'`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from convmesh.jobs import ClusterJob, ray_script

pytestmark = pytest.mark.full
RUN = """
batch = 8
steps = 3
model.name = "lenet5"
data.source = "digits"
plan = { strategy = "data", predict = false }
"""


def test_workers_of_ray_are_ranks(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")
    job = ClusterJob("run.toml", Path("run"), nodes=1, ranks=2, cores=1, has_gpus=False)
    (tmp_path / "train_ray.py").write_text(ray_script(job, str(tmp_path)), encoding="utf-8")
    environment = {**os.environ, "RAY_TRAIN_V2_ENABLED": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "train_ray.py"], cwd=tmp_path, env=environment, timeout=600, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["steps"], summary["ranks"]) == (3, 2)
