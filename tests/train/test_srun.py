"""`srun convmesh train` on a real SLURM cluster of one node: tasks are ranks, SIGTERM saves, `--resume` goes on."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Pools
from tests.train.one_node_slurm import missing, one_node
from tests.train.runs import losses, ran

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(missing()), reason=missing())]

RUN = """
batch = 4
epochs = 3
precision = "fp64"
seed = 3
model.name = "tests.train.runs:classifier"
data.source = "tests.train.runs:images"
data.augment = { flip = "HW", intensity = 0.2 }
plan = { strategy = "data", predict = false }
optimizer = { name = "adamw", lr = 0.01, weight_decay = 0.1 }
schedule.warmup_epochs = 0.5
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with one_node(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def test_tasks_of_srun_train_stop_and_go_on(cluster: dict[str, str], tmp_path: Path, pools: Pools) -> None:
    file, run = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(RUN, encoding="utf-8")
    srun = ["srun", "--ntasks", "2", "--oversubscribe", "--job-name", "digits"]
    train = [*srun, sys.executable, "-m", "convmesh", "train", str(file), "--run", str(run), "--resume"]

    job = subprocess.Popen(
        [*train, "--epochs", "100000"], env=cluster, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert job.stderr is not None
    while "step 1/" not in job.stderr.readline():
        assert job.poll() is None
    subprocess.run(["scancel", "--signal=TERM", "--name=digits"], env=cluster, check=True)  # as before a preemption
    told, errors = job.communicate(timeout=300)
    assert job.returncode == 128 + signal.SIGTERM, errors
    assert "stopped by signal 15, saved" in told
    done = json.loads((run / "summary.json").read_text(encoding="utf-8"))["steps"]
    assert (run / "checkpoints" / str(done)).is_dir()

    last = done + 2
    subprocess.run([*train, "--epochs", "100000", "--steps", str(last)], env=cluster, check=True, timeout=300)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert (summary["steps"], summary["ranks"], summary["mesh"]) == (last, 2, {"data": 2})
    pools[1].run(ran, {"epochs": 100000, "steps": last}, str(tmp_path / "alone"))
    assert losses(run) == pytest.approx(losses(tmp_path / "alone"), rel=1e-9)
