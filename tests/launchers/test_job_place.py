"""Ranks of `srun`, `mpirun` and `flux run` find each other without a wrapper."""

import os
import stat
from pathlib import Path

import pytest

from convmesh.errors import MeshError
from convmesh.launchers import first_host, job_place

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "1165623297",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
FLUX = {
    "FLUX_TASK_RANK": "5",
    "FLUX_JOB_SIZE": "8",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f2y",
}
COUNTS = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize("started", [STEP, OPEN_MPI, HYDRA, FLUX])
def test_a_process_of_a_launcher_is_a_rank(started: dict[str, str]) -> None:
    place = job_place({**started, "MASTER_ADDR": "node03"})
    assert place.pop("MASTER_ADDR") == "node03"
    assert place.pop("MASTER_PORT").isdigit()
    assert place == COUNTS


@pytest.mark.parametrize("started", [STEP, OPEN_MPI, HYDRA, FLUX])
def test_a_launchers_variables_stand_behind_those_that_torch_reads(started: dict[str, str]) -> None:
    assert job_place({**started, "RANK": "0"}) == {}
    assert job_place({**started, "MASTER_ADDR": "node03", "MASTER_PORT": "29500"})["MASTER_PORT"] == "29500"


def test_tasks_of_srun_meet_on_their_first_node() -> None:
    place = job_place(STEP)
    assert place["MASTER_ADDR"] == "node03"
    assert job_place({**STEP, "SLURM_PROCID": "0"})["MASTER_PORT"] == place["MASTER_PORT"]
    assert job_place({**STEP, "SLURM_JOB_ID": "4712"})["MASTER_PORT"] != place["MASTER_PORT"]


def test_no_job_no_place() -> None:
    assert job_place({key: value for key, value in STEP.items() if key != "SLURM_STEP_ID"}) == {}  # a batch script
    assert job_place({}) == {}


@pytest.mark.parametrize("started", [OPEN_MPI, HYDRA])
def test_mpirun_in_a_batch_script_is_not_taken_for_the_srun_that_it_calls(started: dict[str, str]) -> None:
    place = job_place({**STEP, "SLURM_PROCID": "1", "SLURM_JOB_NODELIST": "gpu[7-8]", **started})
    assert (place["RANK"], place["MASTER_ADDR"]) == ("5", "gpu7")


def test_srun_with_a_pmi_of_its_own_is_srun() -> None:
    assert job_place({**STEP, "PMI_RANK": "5", "PMI_SIZE": "8"})["MASTER_ADDR"] == "node03"


@pytest.mark.parametrize(
    ("started", "fix"),
    [
        (OPEN_MPI, "mpirun -x MASTER_ADDR=HOST"),
        (HYDRA, "mpirun -genv MASTER_ADDR HOST"),
        (FLUX, "flux run --env=MASTER_ADDR=HOST"),
    ],
)
def test_ranks_on_several_hosts_are_told_how_to_meet(
    started: dict[str, str], fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MeshError, match="where rank 0 runs") as caught:
        job_place(started)
    assert fix in str(caught.value)


@pytest.mark.parametrize("started", [OPEN_MPI, HYDRA])
def test_ranks_of_one_host_meet_there(started: dict[str, str]) -> None:
    here = {name: "4" if name.endswith("SIZE") else value for name, value in started.items()}
    place = job_place(here)
    assert place["MASTER_ADDR"] == "127.0.0.1"
    assert job_place({**here, next(iter(here)): "2"})["MASTER_PORT"] == place["MASTER_PORT"]


def test_flux_is_asked_for_the_first_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for Flux, which is not in Debian."""
    command = tmp_path / "flux"
    command.write_text('#!/bin/sh\n[ "$*" = "hostlist --nth=0 local" ] && echo tuolumne1001\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert job_place(FLUX)["MASTER_ADDR"] == "tuolumne1001"
    assert job_place({**FLUX, "FLUX_JOB_NNODES": "1"})["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu7", "gpu7"), ("gpu7,gpu9", "gpu7"), ("node[012-014,020],gpu1", "node012"), ("a[1-2]-ib", "a1-ib")],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host
