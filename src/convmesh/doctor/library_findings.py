"""Versions, compilers and libraries."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator

import torch

from convmesh.doctor.finding import Finding
from convmesh.private_torch.tested_versions import NEWEST, OLDEST
from convmesh.system.folder import LOCAL, user_systems
from convmesh.versions import own_version

READERS = {
    "h5py": ("HDF5", "data"),
    "zarr": ("Zarr", "data"),
    "tensorstore": ("Zarr, fastest", "data"),
    "nibabel": ("NIfTI", "data"),
    "blosc2": (".b2nd", "data"),
    "PIL": ("folders of images", "data"),
    "tensorboard": ("TensorBoard", "tensorboard"),
}
"""What each optional library is for, and the extra that installs it."""


def software() -> Iterator[Finding]:
    """What ranks run."""
    yield Finding("python", "ok", f"{platform.python_version()}, convmesh {own_version()}")
    yield _torch()
    yield _compiler()
    yield from (_library(name) for name in READERS)
    yield _calibration()
    yield _launcher()


def _torch() -> Finding:
    release = tuple(int(part) for part in str(torch.__version__).split(".")[:2])
    tested = ".".join(map(str, OLDEST)), ".".join(map(str, NEWEST))
    if OLDEST <= release <= NEWEST:
        return Finding("torch", "ok", f"{torch.__version__}, tested")
    advice = "Run `convmesh verify MODEL --ranks 4` before you trust its gradients."
    return Finding("torch", "missing", f"{torch.__version__}; ConvMesh was tested with {' to '.join(tested)}", advice)


def _compiler() -> Finding:
    """Inductor writes C++ for processors, and Triton, with a launcher in C++, for GPUs."""
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")
    compiler = next((name for name in compilers if shutil.which(name)), None)
    if compiler is None:
        text = "no C++ compiler: compile=True runs without fusing"
        return Finding("compiler", "missing", text, "Install one, e.g. apt-get install g++.")
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        return Finding("compiler", "missing", "no triton: compile=True runs without fusing", "pip install triton")
    return Finding("compiler", "ok", f"{compiler}: compile=True fuses operators")


def _library(name: str) -> Finding:
    purpose, extra = READERS[name]
    if importlib.util.find_spec(name) is not None:
        return Finding(name, "ok", purpose)
    return Finding(name, "missing", purpose, f"pip install 'convmesh[{extra}]'")


def _calibration() -> Finding:
    if LOCAL in user_systems():
        return Finding("calibration", "ok", "this machine is measured: predictions and `auto` use it")
    text = "this machine has not been measured; runs use a one-second estimate"
    return Finding("calibration", "missing", text, "Run `convmesh calibrate` once (it takes minutes).")


def _launcher() -> Finding:
    if "SLURM_JOB_ID" in os.environ:
        return Finding("launcher", "ok", f"inside SLURM job {os.environ['SLURM_JOB_ID']}: start ranks with srun")
    if shutil.which("srun"):
        return Finding("launcher", "ok", "SLURM: `srun convmesh train run.toml`")
    return Finding("launcher", "ok", "`convmesh train run.toml --ranks N`, or torchrun on several hosts")
