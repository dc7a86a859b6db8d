"""Scripts and manifests hold the whole run, in words that their readers understand."""

import ast
import shlex
import subprocess
from pathlib import Path, PurePath
from typing import Any

import pytest

from convmesh.errors import RunError
from convmesh.jobs import ClusterJob, hosts_in, kubernetes_manifest, ray_script, slurm_script

JOB = ClusterJob("conf/My run_2.toml", PurePath("runs/it's here"), nodes=3, ranks=4, cores=2)
TRAIN = ["train", "conf/My run_2.toml", "--run", "runs/it's here", "--resume"]


def test_names_are_those_that_clusters_allow() -> None:
    assert JOB.name == "convmesh-my-run-2"
    assert ClusterJob("package.runs:Large_Net", PurePath("r")).name == "convmesh-large-net"
    assert len(ClusterJob("x" * 90 + ".toml", PurePath("r")).name) <= 40


def test_a_batch_script_asks_for_what_the_job_needs() -> None:
    script = slurm_script(JOB, time="2-00:00:00", partition="gpu", account="proj")
    options = dict(line[10:].partition("=")[::2] for line in script.splitlines() if line.startswith("#SBATCH --"))
    assert options.items() >= {
        "nodes": "3", "ntasks-per-node": "4", "cpus-per-task": "2", "gpus-per-node": "4", "time": "2-00:00:00",
        "signal": "TERM@120", "requeue": "", "partition": "gpu", "account": "proj",
    }.items()  # fmt: skip
    assert "gpus-per-node" not in slurm_script(ClusterJob("a.toml", PurePath("r"), has_gpus=False))


@pytest.mark.parametrize(("status", "queued"), [(0, False), (143, True), (2, False)])
def test_a_batch_script_queues_itself_again_when_it_was_stopped(status: int, queued: bool, tmp_path: Path) -> None:
    """Run by bash, with stand-ins for SLURM's commands; a real SLURM runs it in test_real_slurm."""
    for name, does in {"srun": f'printf "%s\\n" "$@"; exit {status}', "scontrol": 'echo "$@" > asked'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "17"}
    call = ["bash", "-c", slurm_script(JOB)]
    ended = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == status
    assert ended.stdout.splitlines() == ["--kill-on-bad-exit=1", "convmesh", *TRAIN]
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 17\n" if queued else "")


def read(manifest: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    parsed: dict[str, Any] = yaml.safe_load(manifest)
    return parsed


def typed(command: list[str]) -> list[str]:
    shell, flag, line = command
    assert (shell, flag) == ("sh", "-c")
    return shlex.split(line)


def test_a_train_job_of_kubeflow() -> None:
    manifest = read(kubernetes_manifest(JOB, "registry/image:1", "claim"))
    trainer = manifest["spec"]["trainer"]
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("TrainJob", "convmesh-my-run-2")
    assert (trainer["image"], trainer["numNodes"], trainer["numProcPerNode"]) == ("registry/image:1", 3, 4)
    assert typed(trainer["command"])[-len(TRAIN) :] == TRAIN
    assert trainer["resourcesPerNode"]["limits"] == {"cpu": "8", "nvidia.com/gpu": "4"}
    (override,) = manifest["spec"]["podTemplateOverrides"]
    assert override["targetJobs"] == [{"name": "node"}]
    assert override["spec"]["volumes"][0] == {"name": "runs", "persistentVolumeClaim": {"claimName": "claim"}}


@pytest.mark.parametrize(("nodes", "counts"), [(1, {"Master": 1}), (3, {"Master": 1, "Worker": 2})])
def test_a_pytorch_job_of_kubeflow(nodes: int, counts: dict[str, int]) -> None:
    job = ClusterJob("a.toml", PurePath("r"), nodes=nodes, ranks=2, has_gpus=False)
    spec = read(kubernetes_manifest(job, "image", "claim", "pytorchjob"))["spec"]
    assert spec["nprocPerNode"] == "2"
    assert {kind: replica["replicas"] for kind, replica in spec["pytorchReplicaSpecs"].items()} == counts
    (container,) = spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    assert typed(container["command"])[-5:] == ["train", "a.toml", "--run", "r", "--resume"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_an_entry_point_of_ray_is_python() -> None:
    tree = ast.parse(ray_script(JOB, "/shared/it's"))
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert {*TRAIN, "/shared/it's", 12} <= {*constants}


def test_hosts_are_read_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "hosts.txt"
    file.write_text("# rack 1\nnode1\n user@node2  # spare\n\n")
    assert hosts_in(file) == ["node1", "user@node2"]


@pytest.mark.parametrize("text", ["", "node1 node2\n", "node1\nnode1\n", "-oProxyCommand=x\n", b"\xff\xfe"])
def test_files_of_hosts_that_cannot_be_used(text: str | bytes, tmp_path: Path) -> None:
    file = tmp_path / "hosts.txt"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RunError, match="--ssh"):
        hosts_in(file)
