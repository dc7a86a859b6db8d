"""What a run depended on besides its file: versions, git state, hardware, and how torch chooses kernels."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

import torch

from convmesh.supervise.following import TYPED
from convmesh.versions import version_of

PACKAGES = ("convmesh", "torch", "numpy", "scipy", "pydantic", "h5py", "zarr", "tensorstore", "nibabel", "blosc2")
VARIABLES = ("OMP_", "MKL_", "NCCL_", "GLOO_", "CUDA_", "CUBLAS_", "TORCH_", "CONVMESH_", "SLURM_JOB_ID")
"""Prefixes of environment variables that change what a run does."""

_SECONDS_GIT = 30.0


def circumstances(device: torch.device) -> dict[str, Any]:
    """Ready for JSON."""
    return {
        "command": json.loads(os.environ.get(TYPED, "null")) or sys.argv,
        "folder": os.getcwd(),
        "host": platform.node(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version for name in PACKAGES if (version := version_of(name))}
        | {"torch": torch.__version__},
        "git": git_state(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "kernels": kernel_choices(),
        "environment": {n: value for n, value in os.environ.items() if n.startswith(VARIABLES) and n != TYPED},
    }


def kernel_choices() -> dict[str, Any]:
    """The switches by which torch and its libraries choose kernels; the plan has ConvMesh's own choices."""
    cuda = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()} if torch.cuda.is_available() else {}
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "mkldnn": torch.backends.mkldnn.is_available(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        **cuda,
    }


def git_state() -> dict[str, Any] | None:
    """The commit of the current folder, and whether files differ from it; None outside of a repository."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return None
    return {
        "commit": commit,
        "branch": _git("rev-parse", "--abbrev-ref", "HEAD"),
        "changed": bool(_git("diff", "HEAD", "--stat")),
    }


def _git(*args: str) -> str:
    try:
        done = subprocess.run(["git", *args], capture_output=True, text=True, timeout=_SECONDS_GIT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
