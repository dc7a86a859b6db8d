"""A Kubeflow job on Kubernetes: a TrainJob (Trainer 2) or a PyTorchJob (Training Operator 1)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from convmesh.jobs.cluster_job import ClusterJob

Api = Literal["trainjob", "pytorchjob"]

FOLDER = "/work"
"""Where the volume is mounted in a pod; the run file and the run folder are relative to it."""


def kubernetes_manifest(job: ClusterJob, image: str, claim: str, api: Api = "trainjob") -> str:
    """The manifest for `kubectl apply`. `claim` is the PersistentVolumeClaim that holds the run file and the run."""
    made = _train_job(job, image, claim) if api == "trainjob" else _pytorch_job(job, image, claim)
    return "\n".join(_yaml(made)) + "\n"


def _train_job(job: ClusterJob, image: str, claim: str) -> dict[str, Any]:
    trainer = {
        "image": image, "numNodes": job.nodes, "numProcPerNode": job.ranks, "command": _torchrun(job),
        "resourcesPerNode": _resources(job),
    }  # fmt: skip
    pods = {"name": "node", "volumeMounts": _MOUNTS}
    overrides = [{"targetJobs": [{"name": "node"}], "spec": {"volumes": _volumes(claim), "containers": [pods]}}]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer, "podTemplateOverrides": overrides},
    }


def _pytorch_job(job: ClusterJob, image: str, claim: str) -> dict[str, Any]:
    container = {
        "name": "pytorch", "image": image, "command": _torchrun(job),
        "resources": _resources(job), "volumeMounts": _MOUNTS,
    }  # fmt: skip
    pod = {"spec": {"containers": [container], "volumes": _volumes(claim)}}
    counts = {"Master": 1, "Worker": job.nodes - 1}
    replicas = {
        kind: {"replicas": count, "restartPolicy": "OnFailure", "template": pod}
        for kind, count in counts.items()
        if count
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.name},
        "spec": {"nprocPerNode": str(job.ranks), "pytorchReplicaSpecs": replicas},
    }


_MOUNTS = [{"name": "runs", "mountPath": FOLDER}, {"name": "shm", "mountPath": "/dev/shm"}]


def _volumes(claim: str) -> list[dict[str, Any]]:
    """The pod's volumes; its default /dev/shm has 64 MiB, too little for the ranks of a node."""
    return [
        {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def _torchrun(job: ClusterJob) -> list[str]:
    """Kubeflow passes nodes and ranks to torchrun through its environment."""
    return ["sh", "-c", f"cd {FOLDER} && exec {shlex.join(['torchrun', '-m', '--', 'convmesh', *job.command])}"]


def _resources(job: ClusterJob) -> dict[str, Any]:
    amounts = {"cpu": str(job.cores * job.ranks)} | ({"nvidia.com/gpu": str(job.ranks)} if job.has_gpus else {})
    return {"requests": amounts, "limits": amounts}


def _yaml(value: Any, indent: str = "") -> list[str]:
    """A value as YAML blocks, down to scalars and lists of scalars, which YAML reads as JSON."""
    if isinstance(value, Mapping):
        return [line for key, inner in value.items() for line in _entry(f"{indent}{key}:", inner, f"{indent}  ")]
    if _has_blocks(value):
        return [line for item in value for line in _item(_yaml(item, f"{indent}  "), indent)]
    return [f"{indent}{json.dumps(value)}"]


def _entry(head: str, inner: Any, indent: str) -> list[str]:
    lines = _yaml(inner, indent)
    return [head, *lines] if _has_blocks(inner) else [f"{head} {lines[0].strip()}"]


def _has_blocks(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return isinstance(value, Mapping) or (is_list and any(isinstance(item, Mapping) for item in value))


def _item(lines: list[str], indent: str) -> list[str]:
    return [f"{indent}- {lines[0].strip()}", *lines[1:]]
