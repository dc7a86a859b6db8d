"""Tasks of `srun` find each other without a launcher."""

import pytest

from convmesh.slurm import first_host, slurm_place

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}


def test_a_task_of_srun_is_a_rank() -> None:
    place = slurm_place(STEP)
    assert place == {
        "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "node03", "MASTER_PORT": "24711",
    }  # fmt: skip
    assert slurm_place({**STEP, "SLURM_PROCID": "0"})["MASTER_PORT"] == place["MASTER_PORT"]
    assert slurm_place({**STEP, "MASTER_PORT": "29500"})["MASTER_PORT"] == "29500"


def test_torchrun_and_batch_scripts_are_left_alone() -> None:
    assert slurm_place({**STEP, "RANK": "0"}) == {}
    assert slurm_place({key: value for key, value in STEP.items() if key != "SLURM_STEP_ID"}) == {}
    assert slurm_place({}) == {}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu7", "gpu7"), ("gpu7,gpu9", "gpu7"), ("node[012-014,020],gpu1", "node012"), ("a[1-2]-ib", "a1-ib")],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host
