"""What is read from files that others wrote, and a file of each kind to begin with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import convmesh as cm
from convmesh.checkpoint.manifest import _digest
from convmesh.checkpoint.tensor_file import read_header
from convmesh.checkpoint.weights_export import export_weights
from convmesh.data import open_source
from convmesh.kernels.tuned.conv_table import parse_table
from convmesh.plans.plan_text import dumps
from convmesh.system import System
from convmesh.system.operator_table import OperatorTable, Timing
from convmesh.testing import run_ranks
from convmesh.train.config_files import load_config
from convmesh.validation.runs_file import read_runs
from tests.checkpoint.runs import Run

Read = Callable[[Path], object]


def _as_it_is(data: bytes) -> bytes:
    return data


@dataclass(frozen=True)
class Target:
    """One kind of file."""

    name: str
    file: Path
    """The one to change, and what is beside it."""
    read: Read
    """Of the changed file."""
    sealed: Callable[[bytes], bytes] = _as_it_is
    """What a forger would do to have the change accepted."""


RUN_FILE = """
extends = ""
batch = 8
epochs = 2
precision = "amp-bf16"
model = { name = "unet3d", args = { filters = 4 } }
[data]
source = "cosmology"
args = { size = 32, samples = 8 }
augment = { flip = "DH", crop = [8, 8, 8] }
[plan]
strategy = "data+spatial"
mesh = { data = 2, depth = 2 }
[optimizer]
name = "adamw"
lr = 1e-3
[schedule]
name = "cosine"
warmup_epochs = 1
"""

RUNS_FILE = """role,system,gpus,model,precision,strategy,global_batch,step_ms
anchor,abci,4,resnet50,fp32,data=4,128,300
test,abci,8,resnet50,fp32,"data=4,height=2",128,200
"""


def targets(folder: Path) -> list[Target]:
    """A file of every kind, in a folder."""
    return [*_settings(folder), *_tables(folder), *_checkpoints(folder), *_samples(folder)]


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _settings(folder: Path) -> Iterable[Target]:
    yield Target("run.toml", _written(folder / "run.toml", RUN_FILE.replace('extends = ""\n', "")), load_config)
    plan = cm.plan(
        torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()), (4, 3, 8, 8), cm.Mesh(data=2), "data"
    )
    yield Target("plan.toml", _written(folder / "some.plan.toml", dumps(plan)), cm.load_plan)
    cm.System.load("abci").save(folder / "abci.toml")
    yield Target("system.toml", folder / "abci.toml", System.load)
    runs = _written(folder / "runs.csv", RUNS_FILE)
    yield Target("runs.csv", runs, lambda path: read_runs(path, cm.models.names(), System.names()))


def _tables(folder: Path) -> Iterable[Target]:
    call = "relu.default(float32(2, 3))"
    OperatorTable("GPU", (Timing(call, "float32", ((2, 3),), 6, 48, 1e-6, 0.0),)).save(folder / "some.operators.json")
    yield Target("operators.json", folder / "some.operators.json", OperatorTable.load)
    shipped = Path(cm.__file__).parent / "kernels" / "tuned" / "tables" / "nvidia-h200.json"
    yield Target(
        "tuned.json",
        _written(folder / "tuned.json", shipped.read_text(encoding="utf-8")),
        lambda path: parse_table(path.read_bytes().decode("utf-8", "replace"), "NVIDIA H200"),
    )


def _checkpoints(folder: Path) -> Iterable[Target]:
    save_file({"a": torch.ones(3, 4), "b": torch.zeros(5, dtype=torch.int64)}, folder / "some.safetensors")
    yield Target("safetensors", folder / "some.safetensors", read_header)
    step = _saved(folder / "checkpoints")
    yield Target("manifest.json", step / "manifest.json", _exported, _with_digest)
    (tensors,) = step.glob("*.safetensors")
    yield Target("checkpoint's tensors", tensors, _exported)


def _save(folder: Path) -> None:
    run, checkpointer = Run(cm.Mesh(data=1), "data"), cm.Checkpointer(folder)
    run.step(1)
    run.save(checkpointer, 1)
    checkpointer.wait()


def _saved(folder: Path) -> Path:
    run_ranks(1, _save, folder)
    return folder / "1"


def _exported(path: Path) -> object:
    return export_weights(path.parent, path.parent / "out.weights")


def _with_digest(data: bytes) -> bytes:
    try:
        plain: Any = json.loads(data)
        plain.pop("sha256", None)
        return json.dumps({**plain, "sha256": _digest(plain)}).encode()
    except (ValueError, AttributeError, RecursionError):
        return data


def _samples(folder: Path) -> Iterable[Target]:
    import blosc2
    import h5py
    import nibabel
    import zarr

    values, labels = np.ones((2, 1, 4, 4), np.float32), np.zeros(2, np.int64)
    with h5py.File(folder / "some.h5", "w") as file:
        file.create_dataset("inputs", data=values, chunks=(1, 1, 4, 4), compression="gzip")
        file["targets"] = labels
    yield Target("hdf5", folder / "some.h5", _first_sample)
    np.save(folder / "some.npy", values)
    np.save(folder / "some.targets.npy", labels)
    yield Target("npy", folder / "some.npy", _first_sample)
    for version in (2, 3):
        group = zarr.open_group(folder / f"v{version}.zarr", mode="w", zarr_format=version)
        group.create_array("inputs", data=values, chunks=(1, 1, 4, 4))
        group.create_array("targets", data=labels, chunks=(2,))
        header = folder / f"v{version}.zarr" / "inputs" / ("zarr.json" if version == 3 else ".zarray")
        yield Target(f"zarr v{version}", header, lambda path: _first_sample(path.parents[1]))
    for kind in ("inputs", "targets"):
        (folder / "scans" / kind).mkdir(parents=True)
        nibabel.save(nibabel.Nifti1Image(values[0, 0][None], np.eye(4)), folder / "scans" / kind / "a.nii")
    yield Target("nifti", folder / "scans" / "inputs" / "a.nii", lambda path: _first_sample(path.parents[1]))
    blosc2.asarray(values, urlpath=str(folder / "some.b2nd"), mode="w")
    blosc2.asarray(labels, urlpath=str(folder / "some.targets.b2nd"), mode="w")
    yield Target("b2nd", folder / "some.b2nd", _first_sample)


def _first_sample(path: Path) -> object:
    source = open_source(path)
    return source.read(0) if len(source) else None
